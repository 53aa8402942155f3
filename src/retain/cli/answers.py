"""Chat answers in the terminal: of models that write to channels, content and reasoning apart.

Other answers are shown as they are, also those with reasoning between tags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from retain.processing.tokenizer import Tokenizer
from retain.server.tool_format import AnswerParser
from retain.server.tool_formats import detect_tool_format
from retain.terminal import write_dimmed


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as tokens, and how its answer is read. Without a parser all of it is content."""

    token_ids: list[int]
    parser: AnswerParser | None = None
    shown_tokens: frozenset[int] = frozenset()  # special tokens that the parser must see


def prepare_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> ChatPrompt:
    """Return the prompt of a conversation. Raises ValueError where the template cannot render it."""
    prompt = tokenizer.apply_chat_template(messages)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    found = detect_tool_format(tokenizer.chat_templates.find(has_tools=True) or "")
    parser = found.create_parser((), prompt) if found else None
    if not found or not parser:
        return ChatPrompt(ids)
    return ChatPrompt(ids, parser, frozenset(tokenizer.find_special_tokens(found.markers).values()))


class AnswerWriter:
    """Writes an answer as it is generated. Reasoning is dimmed on a terminal, and left out elsewhere."""

    def __init__(self, parser: AnswerParser | None = None, file: TextIO | None = None):
        self.parser = parser
        self.file = file or sys.stdout
        self._content: list[str] = []
        self._is_behind_reasoning = False

    @property
    def content(self) -> str:
        """Return the answer so far without its reasoning, for the conversation's next turn."""
        return "".join(self._content)

    def write(self, text: str, finished: bool) -> None:
        """Write what is certain after this text, and end the line of a finished answer."""
        reasoning = ""
        content = text
        if self.parser:
            reasoning, content, _ = self.parser.feed(text, finished)
        if reasoning and self.file.isatty():
            write_dimmed(self.file, reasoning)
            self._is_behind_reasoning = True
        if content and self._is_behind_reasoning:
            self.file.write("\n\n")
            self._is_behind_reasoning = False
        self._content.append(content)
        self.file.write(content + ("\n" if finished else ""))
        self.file.flush()
