"""Requests and responses of the Responses API, field by field (see openai/protocol.py and items.py)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from retain.server import client_fields
from retain.server.openai.chat_protocol import PositiveInt32
from retain.server.openai.protocol import GenerationFields, Json, NonEmptyStr, Seed
from retain.server.openai.responses.items import InputItem, ItemId, tag_by_type, tag_text_or_list
from retain.server.request_model import StrictModel

LOGPROBS = "message.output_text.logprobs"
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _check_tool_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"only tools of type function are supported, not {kind[:40]}")
    return kind


class FunctionTool(StrictModel):
    """Function that the model may call."""

    type: Annotated[Literal["function"], BeforeValidator(_check_tool_type)]
    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FunctionChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[FunctionChoice, Tag("<list>")],
    Discriminator(tag_text_or_list),
]


class TextFormat(StrictModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class TextJsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: FunctionName
    schema_: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


OutputFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[TextJsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        tag_by_type(),
        custom_error_type="format_type",
        custom_error_message="the type is one of text, json_object and json_schema",
    ),
]


class TextOptions(StrictModel):
    """Options of the answer's text."""

    other_fields = client_fields.RESPONSES_TEXT

    format: OutputFormat | None = None


class ResponsesStreamOptions(StrictModel):
    """Options of a streamed response."""

    other_fields = client_fields.STREAM_OPTIONS


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    other_fields = client_fields.RESPONSES

    model: str
    input: Annotated[
        Annotated[NonEmptyStr, Tag("<text>")]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("<list>")],
        Discriminator(tag_text_or_list),
    ]
    instructions: str | None = Field(None, description="System message; a later response does not inherit it")
    previous_response_id: ItemId | None = Field(None, description="Stored response that the input continues")
    store: bool | None = Field(None, description="Store the response, in bounded memory; default true")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="Returned with the response")
    user: str | None = Field(None, description="Returned with the response")
    safety_identifier: str | None = Field(None, description="Returned with the response")
    max_output_tokens: PositiveInt32 | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = Field(None, description="As in chat completions; OpenAI's Responses API has no seed")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="What to add to the output; reasoning is always returned as text, never encrypted"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description=f"Number of most likely tokens to return per position; above 0 implies {LOGPROBS}"
    )
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Returned with the response")
    stream_options: ResponsesStreamOptions | None = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ResponsesRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice without tools")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """Response of POST /v1/responses. Fields of the request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: Json | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Json] = Field(description="Items of type reasoning, message and function_call")
    previous_response_id: str | None
    store: bool
    usage: ResponseUsage | None
    retain: Json | None = Field(description="KV cache and speculation statistics")


class DeletedResponse(BaseModel):
    """Response of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(BaseModel):
    """List of input items."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
