"""The parts of a chat answer: reasoning, content and tool calls, separated while the answer is generated."""

from __future__ import annotations

from typing import NamedTuple

from retain.server.openai.reasoning_parser import ReasoningParser
from retain.server.openai.tool_parser import ParsedToolCall, ToolParser


class ChatOutput(NamedTuple):
    """New parts of an answer, in this order."""

    reasoning: str
    content: str
    tool_calls: list[ParsedToolCall]


class ChatOutputParser:
    """Separates the text of one choice. None: the model's template has no tools, or no reasoning."""

    def __init__(self, tool_parser: ToolParser | None = None, reasoning_parser: ReasoningParser | None = None):
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the parts that are certain; all of them once the choice has finished."""
        reasoning, content = "", text
        calls: list[ParsedToolCall] = []
        if self._reasoning_parser:
            reasoning, content = self._reasoning_parser.feed(text, finished)
        if self._tool_parser:
            content, calls = self._tool_parser.feed(content)
            if finished:
                rest, more = self._tool_parser.close()
                content, calls = content + rest, calls + more
        return ChatOutput(reasoning, content, calls)
