"""Contents of items: a text, or parts that have text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from retain.server.openai.chat_protocol import RefusalContentPart
from retain.server.request_model import ByType, StrictModel, TextOr


class InputText(StrictModel, other_fields="responses_input_text"):
    """Text of a user, a system message or a tool's output."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(StrictModel, other_fields="responses_output_text"):
    """Text of the model."""

    type: Literal["output_text"]
    text: str


ContentPart = Annotated[
    InputText | OutputText | RefusalContentPart,
    ByType("content_type", "only input_text, output_text and refusal are supported: no images, files or audio"),
]
Content = TextOr[Annotated[list[ContentPart], Field(fail_fast=True)]]


def join_content(content: str | list[InputText | OutputText | RefusalContentPart]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
