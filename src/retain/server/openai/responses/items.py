"""Input items of the Responses API: messages, function calls and their outputs, and reasoning.

The output items of a response are valid input items, so that a client can send them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from retain.server import client_fields
from retain.server.openai.protocol import Json
from retain.server.request_model import StrictModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]


def tag_by_type(default: str | None = None) -> Callable[[Any], str | None]:
    """Return a function that selects the member of a union by the value's `type`.

    Tags are written in angle brackets, because error messages leave such parts out of a field's name.
    """

    def get_tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if isinstance(kind, str) else None

    return get_tag


def tag_text_or_list(value: Any) -> str:
    """Select the text or the list of a union of both."""
    return "<text>" if isinstance(value, str) else "<list>"


class InputText(StrictModel):
    """Text of a user, a system message or a function's output."""

    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """Text of the model."""

    other_fields = client_fields.RESPONSES_OUTPUT_TEXT

    type: Literal["output_text"]
    text: str


ContentPart = Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[OutputText, Tag("<output_text>")],
    Discriminator(
        tag_by_type(),
        custom_error_type="content_type",
        custom_error_message="only input_text and output_text are supported: no images, files or audio",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<list>")],
    Discriminator(tag_text_or_list),
]


class MessageItem(StrictModel):
    """Message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return join_content(self.content)


class FunctionCallItem(StrictModel):
    """Function call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None


class FunctionCallOutputItem(StrictModel):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: ItemId | None = None
    status: ItemStatus | None = None


class ReasoningText(StrictModel):
    """Reasoning of the model."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning before an answer, passed on to the chat template."""

    other_fields = client_fields.RESPONSES_REASONING

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    id: ItemId | None = None
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        """The whole reasoning."""
        return "".join(part.text for part in self.content or ())


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        tag_by_type(default="message"),
        custom_error_type="item_type",
        custom_error_message="only message, function_call, function_call_output and reasoning items are supported",
    ),
]


def join_content(content: str | list[InputText | OutputText]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def dump_item(item: InputItem, default_id: str) -> Json:
    """Return an item as JSON of a fixed form: with an id, and texts as lists of parts."""
    dumped: Json = {"id": default_id, "status": "completed", **item.model_dump(exclude_none=True)}
    if isinstance(dumped.get("content"), str):
        kind = "output_text" if dumped["role"] == "assistant" else "input_text"
        dumped["content"] = [{"type": kind, "text": dumped["content"]}]
    return dumped
