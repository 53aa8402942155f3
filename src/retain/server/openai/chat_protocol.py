"""Requests and responses of chat completions: messages, tools and response formats (see protocol.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from retain.server.openai.protocol import GenerationResponseFields, OutputLimit, SamplingFields
from retain.server.request_model import ByType, StrictModel, TextOr, TextOrOther

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateVariables = Annotated[
    dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Any], Field(max_length=64)
]


class FunctionDefinition(StrictModel):
    """A function that the model may call: its name, its description, and the schema of its parameters."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(StrictModel, other_fields="chat_tool"):
    """Tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(StrictModel, other_fields="chat_function_call"):
    """Name and JSON-encoded arguments of a function call."""

    name: str
    arguments: str


class ToolCall(StrictModel, other_fields="chat_tool_call"):
    """Tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextContentPart(StrictModel, other_fields="chat_text_part"):
    """Text as one part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalContentPart(StrictModel):
    """Refusal of the assistant: a text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal, as the prompt has it."""
        return self.refusal


ContentPart = Annotated[
    TextContentPart | RefusalContentPart,
    ByType("content_type", "only text is supported: no images, audio or files"),
]
Content = TextOr[Annotated[list[ContentPart], Field(fail_fast=True)]]


class InputMessageParam(StrictModel, other_fields="chat_input_message"):
    """System, developer, user or tool message."""

    role: Literal["system", "developer", "user", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None


class AssistantMessageParam(StrictModel, other_fields="chat_assistant_message"):
    """Earlier answer of the model: its text, reasoning and tool calls."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None  # stands for the content where there is none
    reasoning_content: str | None = Field(None, description="Passed on to the chat template")
    reasoning: str | None = None  # another name of reasoning_content


MessageParam = Annotated[
    InputMessageParam | AssistantMessageParam,
    # Without the mapping of roles to models: readers of /openapi.json expect one value a model, not four.
    Field(discriminator="role", json_schema_extra=lambda schema: schema.pop("discriminator", None)),
]


class NamedFunction(StrictModel):
    """Name of the function that the model must call."""

    name: str


class NamedToolChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = TextOrOther[Literal["none", "auto", "required"], NamedToolChoice]


class JsonSchema(StrictModel):
    """JSON schema of a response_format."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOrJsonObjectFormat(StrictModel):
    """response_format of type text or json_object."""

    type: Literal["text", "json_object"]


class JsonSchemaFormat(StrictModel):
    """response_format of type json_schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextOrJsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Reasoning(StrictModel, other_fields="chat_reasoning"):
    """How much the model is to reason, as OpenRouter's API has it."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None


class PromptEndFields(StrictModel):
    """How the prompt of a conversation ends."""

    add_generation_prompt: bool = Field(True, description="Begin an answer; false for a prompt that does not")
    continue_final_message: bool = Field(
        False,
        description="Continue the last message instead of beginning an answer; add_generation_prompt is then false",
    )

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        return self


class ChatCompletionRequest(SamplingFields, PromptEndFields, other_fields="chat"):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: OutputLimit | None = Field(None, description="Like max_tokens, which it replaces")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Number of most likely tokens to return per position; implies logprobs"
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolParam], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables of the chat template, such as `enable_thinking`"
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For chat templates with this variable; `enable_thinking` and `thinking` follow it"
    )
    reasoning: Reasoning | None = Field(None, description="`reasoning_effort` in OpenRouter's form")

    @property
    def requested_tokens(self) -> int | None:
        """Return the number of output tokens that the request asks for: max_completion_tokens precedes max_tokens."""
        return super().requested_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template: those given, and those that the effort stands for.

        A template ignores what it does not know, so a model that cannot be told how much to reason is not.
        """
        asked = self.reasoning or Reasoning()
        effort = self.reasoning_effort or asked.effort
        thinks = effort != "none" if effort else asked.enabled
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        variables |= self.chat_template_kwargs or {}
        return {k: v for k, v in variables.items() if v is not None}

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatCompletionRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice without tools")
        if self.requested_tokens == 0:
            raise ValueError("max_tokens is 0: at least 1")
        return self


class TopLogprob(BaseModel):
    """Token with its log-probability and bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """Log-probability of a token and of its most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the output tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatCompletionMessage(BaseModel):
    """Assistant message of a choice."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(None, description="What the model writes before its answer")
    tool_calls: list[ToolCall] | None = None


class ChatCompletionResponseChoice(BaseModel):
    """One of the answers to a chat request."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletionResponse(GenerationResponseFields):
    """Response of POST /v1/chat/completions."""

    choices: list[ChatCompletionResponseChoice]
