"""Requests and responses of Anthropic's Messages API, field by field.

Requests are strict: an unknown field or a wrong type is an error. Response models only describe what the encoder
builds, for /openapi.json.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from retain.files import quote
from retain.server.anthropic.blocks import AssistantBlock, CacheControl, TextContent, ToolUseBlock, UserBlock
from retain.server.anthropic.tools import AnyTool, TypedTool
from retain.server.openai.protocol import (
    STOP_DESCRIPTION,
    TOP_P_DESCRIPTION,
    ExtensionFields,
    GenerationFields,
    Json,
    StopListField,
    TopP,
)
from retain.server.request_model import StrictModel, TextOr

MAX_TOOLS = 1024  # agents with several servers of tools have a few hundred


class UserMessage(StrictModel):
    """User message: text, and results of tools."""

    role: Literal["user"]
    content: TextOr[list[UserBlock]]


class AssistantMessage(StrictModel):
    """Assistant message: reasoning, text and tool calls."""

    role: Literal["assistant"]
    content: TextOr[list[AssistantBlock]]


class SystemMessage(StrictModel, other_fields="messages_system_message"):
    """System message inside a conversation, where the chat template has such messages."""

    role: Literal["system"]
    content: TextContent = ""
    clear_at: Literal["never", "next_user_message"] = Field(
        "never", description="Whether the message leaves the prompt when a user message follows it"
    )


Message = UserMessage | AssistantMessage | SystemMessage


class ToolChoice(StrictModel, other_fields="messages_tool_choice"):
    """Whether tools are called: as the model likes, one of any, or none."""

    type: Literal["auto", "any", "none"]


class NamedToolChoice(StrictModel, other_fields="messages_tool_choice"):
    """Forces a call of one tool."""

    type: Literal["tool"]
    name: str


class Thinking(StrictModel, other_fields="messages_thinking"):
    """Whether the model reasons before it answers, where its chat template offers the choice."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class JsonOutputFormat(StrictModel):
    """JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel, other_fields="messages_output"):
    """Format that the answer must have."""

    format: JsonOutputFormat | None = None


class MCPServer(StrictModel, extra="ignore"):
    """Server whose tools Anthropic would call."""

    name: str


class DiagnosticsOptions(StrictModel, extra="ignore"):
    """Which earlier message the prompt is compared with. null in the first turn, whose prompt is only remembered."""

    previous_message_id: Annotated[str, Field(max_length=128)] | None = None


class ConversationFields(ExtensionFields, other_fields="messages"):
    """Fields that the prompt is made of, common to both addresses."""

    model: str
    messages: Annotated[
        list[Annotated[Message, Field(discriminator="role")]],
        Field(min_length=1, fail_fast=True, description="Oldest first"),
    ]
    system: TextContent | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    mcp_servers: list[MCPServer] | None = Field(None, description="Left out, with a warning in a header")
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="Breakpoint at the end of the prompt")

    @model_validator(mode="after")
    def _check_conversation(self) -> ConversationFields:
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.name in {
            tool.name for tool in self.left_out_tools
        }:
            raise ValueError(f"tool_choice names {quote(self.tool_choice.name)}, which cannot be called here")
        names = [function["name"] for function in self.functions]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if self.tool_choice and self.tool_choice.type in ("any", "tool") and not names:
            raise ValueError("tool_choice without tools" + (" that can be called here" if self.tools else ""))
        if self.last_turn_calls_tool:
            raise ValueError("the last message calls a tool: the result must follow")
        return self

    @property
    def functions(self) -> list[Json]:
        """The tools that can be called, as functions of chat completions."""
        return [function for tool in self.tools or () if (function := tool.to_function())]

    @property
    def left_out_tools(self) -> list[TypedTool]:
        """The tools that cannot be called here."""
        return [tool for tool in self.tools or () if isinstance(tool, TypedTool) and tool.to_function() is None]

    @property
    def last_turn_calls_tool(self) -> bool:
        """Whether the conversation ends with a call of a tool."""
        last_turn = takewhile(lambda message: message.role == "assistant", reversed(self.messages))
        contents = (message.content for message in last_turn if isinstance(message.content, list))
        return any(isinstance(block, ToolUseBlock) for content in contents for block in content)

    @property
    def continues_answer(self) -> bool:
        """Whether the conversation ends inside of an answer."""
        return self.messages[-1].role == "assistant" and not self.last_turn_calls_tool


class CountTokensRequest(ConversationFields, other_fields="count_tokens"):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields, GenerationFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        description="Lowered to what fits the context; 0 only computes the prompt"
    )
    stop_sequences: StopListField | None = Field(None, description=STOP_DESCRIPTION)
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: TopP | None = Field(None, description=TOP_P_DESCRIPTION)
    diagnostics: DiagnosticsOptions | None = Field(
        None, description="Say what of the prompt changed since an earlier message that had this field, too"
    )


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
    diagnostics: dict[str, Json | None] | None = Field(
        description="`cache_miss_reason`: what changed, as its `type`, and `cache_missed_input_tokens`"
    )
    retain: list[Json] = Field(description="KV cache and speculation statistics")


class TokenCount(BaseModel):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int
