"""The parts of a chat answer: reasoning, content and tool calls, separated while the answer is generated."""

from __future__ import annotations

from typing import NamedTuple

from retain.server.openai.reasoning_parser import ReasoningParser
from retain.server.openai.tool_parser import ToolParser
from retain.server.tool_format import ParsedToolCall


class ChatOutput(NamedTuple):
    """New parts of an answer, in this order."""

    reasoning: str
    content: str
    tool_calls: list[ParsedToolCall]


class ChatOutputParser:
    """Separates the text of one choice. None: the model's template has no tools, or no reasoning."""

    def __init__(self, tool_parser: ToolParser | None = None, reasoning_parser: ReasoningParser | None = None):
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._skipped = ChatOutput("", "", [])  # text of the prompt that the parsers may still return

    def skip(self, text: str) -> None:
        """Take text of the prompt as the beginning of the answer: only what follows is returned."""
        self._separate(text, finished=False)
        self._skipped = self.copy()._separate("", finished=True)

    def copy(self) -> ChatOutputParser:
        """Return a parser that goes on from here by itself."""
        tool_parser = self._tool_parser
        reasoning_parser = self._reasoning_parser
        other = ChatOutputParser(tool_parser and tool_parser.copy(), reasoning_parser and reasoning_parser.copy())
        other._skipped = self._skipped
        return other

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the parts that are certain; all of them once the choice has finished."""
        output = self._separate(text, finished)
        skipped = self._skipped
        if not any(skipped) or not any(output):
            return output
        reasoning, skipped_reasoning = _drop_skipped(output.reasoning, skipped.reasoning)
        content, skipped_content = _drop_skipped(output.content, skipped.content)
        self._skipped = ChatOutput(skipped_reasoning, skipped_content, [])
        return ChatOutput(reasoning, content, output.tool_calls)

    def _separate(self, text: str, finished: bool) -> ChatOutput:
        reasoning = ""
        content = text
        calls: list[ParsedToolCall] = []
        if self._reasoning_parser:
            reasoning, content = self._reasoning_parser.feed(text, finished)
        if self._tool_parser:
            content, calls = self._tool_parser.feed(content)
            if finished:
                rest, more = self._tool_parser.close()
                content += rest
                calls += more
        return ChatOutput(reasoning, content, calls)


def _drop_skipped(text: str, skipped: str) -> tuple[str, str]:
    """Return text without what its beginning shares with skipped text, and what is still to skip.

    Nothing is, where the text begins otherwise: skipped text has become part of a marker or of a call.
    """
    pairs = enumerate(zip(text, skipped, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(skipped)))
    return text[shared:], skipped[shared:] if shared else ""
