"""Input items of the Responses API: messages, reasoning, calls and their outputs, and what is left out.

The output items of a response are valid input items, so that a client can send them back.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from retain.server.client_fields import read_left_out_types
from retain.server.openai.protocol import Json
from retain.server.openai.responses.calls import CallItem, Content, Item, OutputItem, join_content
from retain.server.openai.responses.tools import Tool
from retain.server.request_model import OTHER, ByType, LeftOutModel, StrictModel, get_type, tag_type

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
}
ENCODED_REASONING = "retain:"  # what `encrypted_content` of this server begins with
OTHER_ITEMS = read_left_out_types()["items"]


class MessageItem(Item):
    """Message of the user, the model, the system or the developer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content

    @property
    def text(self) -> str:
        """The texts of the message's parts in a row."""
        return join_content(self.content)


class ReasoningText(StrictModel):
    """Reasoning of the model in an earlier answer."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Item, other_fields="responses_reasoning"):
    """Reasoning before an answer, passed on to the chat template."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = Field(
        None, description="Read where this server made it and there is no content; else ignored"
    )

    @property
    def text(self) -> str:
        """The whole reasoning; empty where only another server can read it."""
        if self.content:
            return "".join(part.text for part in self.content)
        return decode_reasoning(self.encrypted_content or "")


class ToolsItem(Item, other_fields="responses_tools_item"):
    """Tools that a conversation adds to those of its request."""

    type: Literal["additional_tools", "tool_search_output"]
    call_id: str | None = Field(None, description="The search that found them")
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)]


class ItemReference(StrictModel):
    """An item of a stored response, or of its input, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class OtherItem(LeftOutModel):
    """Item that only other servers understand. It is left out, and the header `x-retain-warning` names its type."""

    type: str
    id: str | None = None


def _tag_item(value: Any) -> str | None:
    is_reference = isinstance(value, dict) and "role" not in value and "id" in value
    kind = get_type(value, "item_reference" if is_reference else "message")
    is_hosted = kind == "tool_search_call" and isinstance(value, dict) and value.get("execution") != "client"
    return OTHER if is_hosted or kind in OTHER_ITEMS else tag_type(kind)


InputItem = Annotated[
    MessageItem | ReasoningItem | CallItem | OutputItem | ToolsItem | ItemReference | OtherItem,
    ByType(
        "item_type",
        "only items of messages, reasoning, tool calls, their outputs and references to stored items are supported",
        _tag_item,
    ),
]


def create_id(prefix: str) -> str:
    """Create the id of a response or an item."""
    return f"{prefix}_{uuid4().hex}"


def encode_reasoning(text: str) -> str:
    """Return `encrypted_content` of a reasoning item: its text, for clients that send back nothing else."""
    return ENCODED_REASONING + b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str:
    """Return the text of `encrypted_content`; empty if another server made it."""
    if not encoded.startswith(ENCODED_REASONING):
        return ""
    try:
        return b64decode(encoded.removeprefix(ENCODED_REASONING), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def dump_item(item: InputItem) -> Json:
    """Return an item as JSON of a fixed form: with an id, and texts as lists of parts."""
    dumped: Json = {"id": None, "status": "completed", **item.model_dump(exclude_none=True, by_alias=True)}
    dumped["id"] = dumped["id"] or create_id(ID_PREFIXES.get(item.type, "item"))
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        dumped["content"] = [{"type": kind, "text": item.content}]
    return dumped
