"""What may be asked over HTTP, field by field, and what it means to the engine. An unknown field is an error.

Fields are OpenAI's; those of the class `Extras` are ours or other engines'. What is not known here: templates, limits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from retain.sampling_params import SamplingParams

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveInt32 = Annotated[int, Field(ge=1, lt=2**31)]


class StrictModel(BaseModel):
    """Exactly these fields, of exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _coerce_integers(cls, data: Any) -> Any:
        """JSON does not tell 1.0 from 1."""
        return {k: _coerce_int(v) for k, v in data.items()} if isinstance(data, dict) else data


def _coerce_int(x: Any, depth: int = 2) -> Any:
    if isinstance(x, list) and depth:
        return [_coerce_int(y, depth - 1) for y in x]
    return int(x) if isinstance(x, float) and x.is_integer() else x


LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]


class StreamOptions(StrictModel):
    """Of `stream`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: there is nothing to hide from


class ExtensionFields(StrictModel):
    """What this engine can and OpenAI's cannot; and fields of OpenAI's that change nothing here."""

    kv_policy: str | None = Field(None, description="What the cache keeps of this request: docs/policies.md")
    speculate: str | None = Field(None, description="Who drafts: off, or one of the server's (GET /v1/models)")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Share prefixes only with requests of the same key and salt"
    )
    pin: Annotated[float, Field(gt=0)] | None = Field(None, description="Keep the prompt cached for so many seconds")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(default_factory=list)
    ignore_eos: bool = False
    user: str | None = Field(None, description="Accepted; changes nothing")
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing")
    metadata: dict[str, str] | None = Field(None, description="Accepted; changes nothing")
    store: bool | None = Field(None, description="Accepted; nothing is stored")


class SamplingFields(ExtensionFields):
    """How tokens are drawn."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: NonEmptyStr | Annotated[list[NonEmptyStr], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = Field(None, description="By token id")

    def to_sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The same for the engine. Raises ValueError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(t), x) for t, x in (self.logit_bias or {}).items()),
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            n=self.n or 1,
        )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: (
        NonEmptyStr
        | Annotated[list[NonEmptyStr], Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="The same as n, or absent")
    suffix: None = Field(None, description="Not supported")

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not supported")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """As a list."""
        p = self.prompt
        return [p] if isinstance(p, str) or isinstance(p[0], int) else p  # type: ignore[return-value]


class FunctionDefinition(StrictModel):
    """What a tool is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(StrictModel):
    """What a model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionCallParam(StrictModel):
    """What it called, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParam(StrictModel):
    """A call that it made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallParam


class TextContentPart(StrictModel):
    """A part of a message. Only text is understood."""

    type: Literal["text"]
    text: str


class InputMessageParam(StrictModel):
    """What was said to the model."""

    role: Literal["system", "developer", "user", "tool"]
    content: str | list[TextContentPart]
    name: str | None = None
    tool_call_id: str | None = None


class AssistantMessageParam(StrictModel):
    """What the model said, or called."""

    role: Literal["assistant"]
    content: str | list[TextContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    refusal: None = None


MessageParam = Annotated[InputMessageParam | AssistantMessageParam, Field(discriminator="role")]


class NamedFunction(StrictModel):
    """Of a tool."""

    name: str


class NamedToolChoice(StrictModel):
    """This one must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(StrictModel):
    """Of `response_format`."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOrJsonObjectFormat(StrictModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(StrictModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextOrJsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    max_tokens: PositiveInt32 | None = Field(None, description="The older name of max_completion_tokens")
    max_completion_tokens: PositiveInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="Not null: logprobs, and so many")
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolParam], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Accepted; a model calls what it calls")

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatCompletionRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice without tools")
        return self


class TokenizeCompletionRequest(StrictModel):
    """POST /tokenize, of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class TokenizeChatRequest(StrictModel):
    """POST /tokenize, of a conversation."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    add_generation_prompt: bool = True


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
