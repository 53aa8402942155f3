"""Requests and responses of chat completions: messages, tools and response formats (see protocol.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from retain.server import client_fields
from retain.server.openai.protocol import GenerationResponseFields, SamplingFields
from retain.server.request_model import StrictModel

PositiveInt32 = Annotated[int, Field(ge=1, lt=2**31)]


class FunctionDefinition(StrictModel):
    """Function definition of a tool."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(StrictModel):
    """Tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(StrictModel):
    """Name and JSON-encoded arguments of a function call."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """Tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextContentPart(StrictModel):
    """Text content part. Other types are not supported."""

    type: Literal["text"]
    text: str


class InputMessageParam(StrictModel):
    """System, developer, user or tool message."""

    role: Literal["system", "developer", "user", "tool"]
    content: str | list[TextContentPart]
    name: str | None = None
    tool_call_id: str | None = None


class AssistantMessageParam(StrictModel):
    """Assistant message."""

    role: Literal["assistant"]
    content: str | list[TextContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="Passed on to the chat template")


MessageParam = Annotated[
    InputMessageParam | AssistantMessageParam,
    # Without the mapping of roles to models: readers of /openapi.json expect one value a model, not four.
    Field(discriminator="role", json_schema_extra=lambda schema: schema.pop("discriminator", None)),
]


class NamedFunction(StrictModel):
    """Name of a function."""

    name: str


class NamedToolChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


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


class ChatTemplateKwargs(StrictModel):
    """Variables of the chat template."""

    enable_thinking: bool | None = Field(None, description="Whether the model reasons before it answers")


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    other_fields = client_fields.CHAT

    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    max_tokens: PositiveInt32 | None = Field(None, description="Deprecated: use max_completion_tokens")
    max_completion_tokens: PositiveInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Number of most likely tokens to return per position; implies logprobs"
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[list[ToolParam], Field(min_length=1, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = Field(None, description="As in vLLM's server")
    add_generation_prompt: bool = Field(True, description="Begin an answer; false for a prompt that does not")
    continue_final_message: bool = Field(
        False,
        description="Continue the last message instead of beginning an answer; add_generation_prompt is then false",
    )

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatCompletionRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice without tools")
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
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
    reasoning_content: str | None = Field(None, description="Text between think tags, where the template has them")
    tool_calls: list[ToolCall] | None = None


class ChatCompletionResponseChoice(BaseModel):
    """Choice."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletionResponse(GenerationResponseFields):
    """Response of POST /v1/chat/completions."""

    choices: list[ChatCompletionResponseChoice]
