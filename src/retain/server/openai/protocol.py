"""Requests and responses of the OpenAI API, field by field, except for chat completions (chat_protocol.py).

Requests are strict: an unknown field or a wrong type is an error. Response models only describe what the encoder
builds, for /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from retain.plugins import parse_spec
from retain.processing.input import Prompt, list_prompts
from retain.sampling_params import MAX_STOP_LENGTH, SamplingParams, check_stop_strings
from retain.server.openai.kv_hints import KvHints
from retain.server.request_model import StrictModel

Json = dict[str, Any]
Count = Annotated[int, Field(ge=0, lt=2**31)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**31)]
OutputLimit = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: none
TokenId = Count
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=0.01, le=10)]  # 1: none
Seed = Annotated[int, Field(ge=-1, lt=2**63)]
TopP = Annotated[float, Field(ge=0, le=1)]
SEED_DESCRIPTION = "-1: a random one"
TOP_P_DESCRIPTION = "0: the most likely token"
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]


def _check_stop(stop: str | list[str]) -> str | list[str]:
    check_stop_strings(([stop] if stop else []) if isinstance(stop, str) else stop)
    return stop


StopListField = Annotated[list[NonEmptyStr], Field(max_length=16), AfterValidator(_check_stop)]
StopField = Annotated[
    Annotated[str, AfterValidator(_check_stop), Tag("<text>")] | Annotated[StopListField, Tag("<list>")],
    Discriminator(lambda stop: "<list>" if isinstance(stop, list) else "<text>"),  # errors are those of one of them
]
EMPTY_AS_NONE = AfterValidator(lambda text: text or None)  # for a text of clients that have nothing to say
OptionalText = Annotated[str, EMPTY_AS_NONE]
CacheSalt = Annotated[
    Annotated[str, Field(max_length=256)] | None,
    Field(description="Share prefixes only with requests of the same key and salt"),
]


def tag_prompt(value: Any) -> str:
    """Select the member of a union of a text, a list of texts, token ids and a list of token ids."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<ids>"


STOP_DESCRIPTION = f"End the output before one of these texts: at most 16, of {MAX_STOP_LENGTH} characters together"


class StreamOptions(StrictModel, other_fields="stream_options"):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="With include_usage: the usage until now in every chunk")


class ExtensionFields(StrictModel):
    """Fields that OpenAI's API does not have."""

    kv_policy: OptionalText | None = Field(
        None, description="KV cache policy of this request, see docs/guide/policies.md"
    )
    speculate: OptionalText | None = Field(
        None, description="Drafter for speculative decoding: off, or one listed by GET /v1/models"
    )
    cache_salt: CacheSalt = None
    pin: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Seconds to keep the prompt's pages in the prefix cache; 0: as long as there is room"
    )
    kv_hints: KvHints | None = Field(None, description="Hints to the KV cache, see docs/guide/agents.md")
    explain_prefix: bool = Field(
        False, description="Say why no more of the prompt was cached: `retain.prefix` of each choice"
    )
    top_k: OutputLimit = Field(0, description="Sample from the most likely tokens; 0 or -1: from all")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="Exclude tokens below this share of the highest probability"
    )
    repetition_penalty: Penalty = Field(1.0, description="Penalty of tokens in prompt or output; 1: none")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = Field(
        default_factory=list, description="Token ids that end the output"
    )
    min_tokens: Count = Field(
        0, description="Output tokens at least, before an end token, a stop token or a stop string"
    )
    ignore_eos: bool = Field(False, description="Generate up to max_tokens, past the end of text")

    @field_validator("kv_policy")
    @classmethod
    def _refuse_files(cls, spec: str | None) -> str | None:
        """Refuse policies that read files or run code: a client must not choose what the server opens."""
        if spec and {"file", "press"} & parse_spec(spec)[1].keys():
            raise ValueError("a request cannot name a file of the server, or a press: start it with such a --kv-policy")
        return spec


class GenerationFields(ExtensionFields):
    """Fields common to all requests that generate."""

    prompt_field: ClassVar[str] = "messages"  # what errors about the prompt name
    operation: ClassVar[str] = "chat"  # in traces

    model: str
    stream: bool | None = None


class SamplingFields(GenerationFields, other_fields="sampling"):
    """Sampling fields common to both completion endpoints."""

    max_tokens: OutputLimit | None = Field(None, description="Cut to what the context leaves; -1: all of that")
    n_predict: OutputLimit | None = Field(None, description="llama.cpp's max_tokens")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = Field(None, description=TOP_P_DESCRIPTION)
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopField | None = Field(None, description=STOP_DESCRIPTION)
    stream_options: StreamOptions | None = None
    seed: Seed | None = Field(None, description=SEED_DESCRIPTION)
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = Field(None, description="Bias by token id")
    repeat_penalty: Penalty | None = Field(None, description="llama.cpp's repetition_penalty, over the whole text")
    return_token_ids: bool = Field(False, description="Return the ids of prompt and answer, as in vLLM's server")

    @property
    def requested_tokens(self) -> int | None:
        """The output tokens that are asked for; None: no number, -1: as many as fit."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage until now."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Convert the fields to the engine's parameters. Raises ValueError for a value out of range."""
        stop = (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())
        penalty = self.repetition_penalty
        if self.repeat_penalty is not None and "repetition_penalty" not in self.model_fields_set:
            penalty = self.repeat_penalty
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens or self.min_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p,
            repetition_penalty=penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            n=self.n or 1,
        )


class Usage(BaseModel):
    """Numbers of tokens of the prompt and the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class GenerationResponseFields(BaseModel):
    """Fields common to the responses of both completion endpoints."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage
    retain: list[Json] = Field(description="KV cache and speculation statistics per choice")


class CompletionRequest(SamplingFields, other_fields="completion"):
    """POST /v1/completions."""

    prompt_field = "prompt"
    operation = "text_completion"

    prompt: Annotated[
        Annotated[NonEmptyStr, Tag("<text>")]
        | Annotated[list[NonEmptyStr], Field(min_length=1, fail_fast=True), Tag("<texts>")]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True), Tag("<lists>")],
        Discriminator(tag_prompt),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: OptionalText | None = Field(
        None, description="Text behind the answer, which fills the middle: for models with the tokens of that"
    )
    echo: bool | None = Field(
        None, description="Return the prompt too: a text as it was sent, token ids as the text that they show"
    )
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="Must equal n if given")

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of other than n is not supported")
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionRequest:
        if self.suffix is not None and (self.echo or not all(isinstance(p, str) for p in self.prompts)):
            raise ValueError("suffix is for prompts that are texts, without echo")
        return self

    @property
    def num_choices(self) -> int:
        """The choices of all prompts."""
        return len(self.prompts) * (self.n or 1)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list, also where one is given alone."""
        return list_prompts(self.prompt)


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the text's tokens; null for the first prompt token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionResponseChoice(BaseModel):
    """One of the completions of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class CompletionResponse(GenerationResponseFields):
    """Response of POST /v1/completions."""

    choices: list[CompletionResponseChoice]


class ModelOptions(BaseModel):
    """Engine options of a served model."""

    kv_policy: str
    speculate: str | None
    drafters: list[str] = Field(description="Drafters that requests may select")


class ModelCard(BaseModel):
    """Served model. `retain`: its KV policy and drafters."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "retain"
    max_model_len: int
    parent: str | None = Field(None, description="Of an adapter: the model")
    retain: ModelOptions


class ModelList(BaseModel):
    """The models that the server offers."""

    object: str = "list"
    data: list[ModelCard]
