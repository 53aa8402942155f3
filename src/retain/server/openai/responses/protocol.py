"""Requests and responses of the Responses API, field by field (see openai/protocol.py and items.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from retain.server.openai.chat_protocol import ReasoningEffort, TextOrJsonObjectFormat
from retain.server.openai.protocol import (
    EMPTY_AS_NONE,
    TOP_P_DESCRIPTION,
    GenerationFields,
    Json,
    PositiveCount,
    Seed,
    TopP,
)
from retain.server.openai.responses.items import InputItem
from retain.server.openai.responses.tools import FunctionName, Tool, ToolChoice
from retain.server.request_model import ByType, StrictModel, TextOr

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class TextJsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: FunctionName
    schema_: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


OutputFormat = Annotated[
    TextOrJsonObjectFormat | TextJsonSchemaFormat,
    ByType("format_type", "the type is one of text, json_object and json_schema"),
]


class TextOptions(StrictModel, other_fields="responses_text"):
    """Options of the answer's text."""

    format: OutputFormat | None = None


class ResponsesStreamOptions(StrictModel, other_fields="responses_stream_options"):
    """Options of a streamed response."""


class ReasoningOptions(StrictModel, other_fields="responses_reasoning_options"):
    """How much the model is to reason."""

    effort: ReasoningEffort | None = Field(
        None, description="none: without reasoning, where the chat template has a variable for that; others: with it"
    )


class PromptCacheOptions(StrictModel, other_fields="responses_prompt_cache"):
    """How the request uses the prefix cache."""

    prewarm: bool | None = None
    comparison_response_id: Annotated[str, Field(max_length=128)] | None = None


class ResponsesRequest(GenerationFields, other_fields="responses"):
    """POST /v1/responses."""

    input: TextOr[Annotated[list[InputItem], Field(fail_fast=True)]] = Field(
        description="May be empty: then the instructions, or the stored conversation, are answered"
    )
    instructions: str | None = Field(None, description="System message; a later response does not inherit it")
    previous_response_id: Annotated[str, Field(max_length=128), EMPTY_AS_NONE] | None = Field(
        None, description="Stored response that the input continues"
    )
    store: bool | None = Field(None, description="Store the response, in bounded memory; default true")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="Returned with the response")
    user: str | None = Field(None, description="Returned with the response")
    safety_identifier: str | None = Field(None, description="Returned with the response")
    max_output_tokens: PositiveCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = Field(None, description=TOP_P_DESCRIPTION)
    seed: Seed | None = Field(None, description="As in chat completions; OpenAI's Responses API has no seed")
    include: list[Includable] | None = Field(
        None,
        description="What to add to the output; `reasoning.encrypted_content` is the reasoning's text, encoded, for "
        "clients that send nothing else back. Items of hosted tools never occur",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description=f"Number of most likely tokens to return per position; above 0 implies {LOGPROBS}"
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = Field(
        None, description="Those that only OpenAI's servers run are left out; `x-retain-warning` names their types"
    )
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Returned with the response")
    stream_options: ResponsesStreamOptions | None = None
    generate: bool | None = Field(None, description="false: compute the prompt, and answer with no output")
    prompt_cache_options: PromptCacheOptions | None = Field(
        None,
        description="`prewarm`: as `generate: false`; `comparison_response_id`: say what of the prompt changed since "
        "then, in `prompt_cache_diagnostics`",
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning items have `encrypted_content`."""
        return ENCRYPTED_REASONING in (self.include or ())

    @property
    def generates(self) -> bool:
        """Whether the answer has any output. Clients that begin a session only want its prompt to be computed."""
        options = self.prompt_cache_options
        return self.generate is not False and not (options is not None and options.prewarm)


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
    output: list[Json] = Field(description="Items of reasoning, messages and calls of tools")
    previous_response_id: str | None
    store: bool
    usage: ResponseUsage | None
    prompt_cache_diagnostics: Json | None = Field(
        description="What changed since the response of `comparison_response_id`: `type`, and of a `cache_miss` its "
        "`reason` and `cache_missed_tokens`"
    )
    retain: Json | None = Field(description="KV cache and speculation statistics")


class DeletedResponse(BaseModel):
    """Response of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(BaseModel):
    """One page of a list of input items."""

    object: Literal["list"] = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
