"""Requests and responses of Anthropic's Messages API, field by field.

Requests are strict: an unknown field or a wrong type is an error. Response models only describe what the encoder
builds, for /openapi.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from retain.server import client_fields
from retain.server.openai.protocol import ExtensionFields, GenerationFields, Json, NonEmptyStr
from retain.server.request_model import StrictModel

MAX_BREAKPOINTS = 4


class CacheControl(StrictModel):
    """Breakpoint: the prompt up to this block stays in the prefix cache for some time."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """How long the prefix is to stay."""
        return 3600.0 if self.ttl == "1h" else 300.0


class CacheableBlock(StrictModel):
    """Base of blocks that may be breakpoints."""

    cache_control: CacheControl | None = None


class TextBlock(CacheableBlock):
    """Text."""

    other_fields = client_fields.MESSAGES_TEXT_BLOCK

    type: Literal["text"]
    text: str


def _content_kind(content: Any) -> str:
    return "text" if isinstance(content, str) else "blocks"


class ToolUseBlock(CacheableBlock):
    """Tool call of an assistant message."""

    other_fields = client_fields.MESSAGES_TOOL_USE

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], Tag("blocks")], Discriminator(_content_kind)
]


class ToolResultBlock(CacheableBlock):
    """Result of a tool call, in a user message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextContent = ""
    is_error: bool = Field(False, description="The content then begins with `Error: ` in the prompt")


class ThinkingBlock(StrictModel):
    """Reasoning of an assistant message, passed on to the chat template. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    """Reasoning that only its author can read. Ignored."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
Block = TextBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserMessage(StrictModel):
    """User message: text, and results of tools."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[UserBlock], Tag("blocks")], Discriminator(_content_kind)
    ]


class AssistantMessage(StrictModel):
    """Assistant message: reasoning, text and tool calls."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[AssistantBlock], Tag("blocks")], Discriminator(_content_kind)
    ]


class SystemMessage(StrictModel):
    """System message inside a conversation, where the chat template has such messages."""

    role: Literal["system"]
    content: TextContent


Message = UserMessage | AssistantMessage | SystemMessage


class Tool(CacheableBlock):
    """Tool that the model may call. Server tools are not supported."""

    other_fields = client_fields.MESSAGES_TOOL

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(StrictModel):
    """Whether tools are called: as the model likes, one of any, or none."""

    other_fields = client_fields.MESSAGES_TOOL_CHOICE

    type: Literal["auto", "any", "none"]


class NamedToolChoice(StrictModel):
    """Forces a call of one tool."""

    other_fields = client_fields.MESSAGES_TOOL_CHOICE

    type: Literal["tool"]
    name: str


class Thinking(StrictModel):
    """Whether the model reasons before it answers, where its chat template offers the choice."""

    other_fields = client_fields.MESSAGES_THINKING

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonOutputFormat(StrictModel):
    """JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Format of the answer."""

    other_fields = client_fields.MESSAGES_OUTPUT

    format: JsonOutputFormat | None = None


class ConversationFields(ExtensionFields):
    """Fields that the prompt is made of, common to both addresses."""

    other_fields = client_fields.MESSAGES

    model: str
    messages: Annotated[
        list[Annotated[Message, Field(discriminator="role")]],
        Field(min_length=1, fail_fast=True, description="Oldest first"),
    ]
    system: TextContent | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="Breakpoint at the end of the prompt")

    @model_validator(mode="after")
    def _check_conversation(self) -> ConversationFields:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's: continuing an answer (prefill) is not supported")
        if self.tool_choice and self.tool_choice.type in ("any", "tool") and not self.tools:
            raise ValueError("tool_choice without tools")
        if (n := sum(1 for _ in self.iter_breakpoints())) > MAX_BREAKPOINTS:
            raise ValueError(f"{n} blocks have cache_control: at most {MAX_BREAKPOINTS} may")
        return self

    def iter_breakpoints(self) -> Iterator[CacheControl]:
        """Yield the breakpoints in the order of the prompt."""
        blocks: list[Any] = [*(self.tools or ()), *(self.system if isinstance(self.system, list) else ())]
        for message in self.messages:
            blocks += message.content if isinstance(message.content, list) else ()
        yield from (block.cache_control for block in blocks if getattr(block, "cache_control", None))
        if self.cache_control:
            yield self.cache_control


class CountTokensRequest(ConversationFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields, GenerationFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        description="Lowered to what fits the context; 0 only computes the prompt"
    )
    stop_sequences: Annotated[list[NonEmptyStr], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None


class Usage(BaseModel):
    """Token counts. The prompt is the sum of the three input counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(BaseModel):
    """Response of POST /v1/messages."""

    id: str
    type: str
    role: str
    model: str
    content: list[Json]
    stop_reason: str
    stop_sequence: str | None
    usage: Usage
    retain: list[Json] = Field(description="KV cache and speculation statistics")


class TokenCount(BaseModel):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int
