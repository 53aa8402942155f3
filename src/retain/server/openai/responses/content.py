"""Contents of items: a text, or parts that have text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from retain.server.openai.chat_protocol import RefusalContentPart
from retain.server.request_model import StrictModel, tag_by_type, tag_text_or_list


class InputText(StrictModel, other_fields="responses_input_text"):
    """Text of a user, a system message or a tool's output."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(StrictModel, other_fields="responses_output_text"):
    """Text of an earlier answer of the model."""

    type: Literal["output_text"]
    text: str


ContentPart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputText, Tag("<text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[RefusalContentPart, Tag("<refusal>")],
    Discriminator(
        tag_by_type(),
        custom_error_type="content_type",
        custom_error_message="only input_text, output_text and refusal are supported: no images, files or audio",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("<list>")],
    Discriminator(tag_text_or_list),
]


def join_content(content: str | list[InputText | OutputText | RefusalContentPart]) -> str:
    """Return the texts of a message's parts in a row."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
