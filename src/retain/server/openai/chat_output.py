"""The parts of a chat answer: reasoning, content and tool calls, separated while the answer is generated.

However the text is cut into pieces: each parser holds back what may begin its next marker.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from retain.server.tool_format import AnswerParser, ChatOutput, ParsedToolCall, ToolFormat

BEGIN = "<think>"
END = "</think>"


def supports_reasoning(template: str) -> bool:
    """Return whether a chat template writes reasoning between think tags."""
    return END in template


class ReasoningParser:
    """Separates streamed output into reasoning and content. Reasoning is at the beginning of an answer only.

    `prompt_opens_reasoning`: the template ended the prompt with the begin tag, so that the output starts inside.
    """

    def __init__(self, prompt_opens_reasoning: bool):
        self._buffer = ""
        self._blanks: list[str] = []  # that precede all other text: they are content if no reasoning follows
        self._state = "reasoning" if prompt_opens_reasoning else "start"

    def copy(self) -> ReasoningParser:
        """Return a parser that goes on from here by itself."""
        other = copy(self)
        other._blanks = [*self._blanks]
        return other

    def feed(self, text: str, finished: bool) -> tuple[str, str]:
        """Add generated text. Returns what is certainly reasoning, and what is certainly content."""
        self._buffer += text
        if self._state == "start":
            visible = self._buffer.lstrip()
            self._blanks.append(self._buffer[: len(self._buffer) - len(visible)])
            self._buffer = visible
            if visible.startswith(BEGIN):
                self._state = "reasoning"
                self._buffer = visible[len(BEGIN) :]
            elif finished or not BEGIN.startswith(visible):
                self._state = "content"
                self._buffer = "".join([*self._blanks, visible])
        if self._state == "reasoning":
            reasoning, tag, after = self._buffer.partition(END)
            if tag:
                self._state = "blank"
                self._buffer = after
            else:
                cut = len(reasoning) - (0 if finished else partial_marker_length(reasoning, END))
                self._buffer = reasoning[cut:]
                reasoning = reasoning[:cut]
            return reasoning, self._take_content()
        return "", self._take_content()

    def _take_content(self) -> str:
        """Return the buffered content, without the blank lines that follow the end tag."""
        if self._state == "blank":
            self._buffer = self._buffer.lstrip("\n")
            self._state = "content" if self._buffer else "blank"
        if self._state != "content":
            return ""
        content = self._buffer
        self._buffer = ""
        return content


class ToolParser:
    """Separates streamed output into content and tool calls. A call of an unknown tool counts as content."""

    def __init__(self, tool_format: ToolFormat, tool_names: Collection[str]):
        self._format = tool_format
        self._tool_names = tool_names
        self._in_tool_call = not tool_format.begin
        self._marker_start = ""  # end of the text, which may begin the next marker
        self._body_parts: list[str] = []  # of the call that is not yet complete

    def copy(self) -> ToolParser:
        """Return a parser that goes on from here by itself."""
        other = copy(self)
        other._body_parts = [*self._body_parts]
        return other

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Add generated text. Returns the text that is certainly content, and the calls that are complete."""
        content: list[str] = []
        calls: list[ParsedToolCall] = []
        text = self._marker_start + text
        start = 0
        while (end := self._find_marker(text, start)) >= 0:
            if self._in_tool_call:
                body, known = self._take_body(text[start:end])
                content += [] if known else [self._format.begin, body, self._format.end]
                calls += known
            else:
                content.append(text[start:end])
            start = end + len(self._next_marker)
            self._in_tool_call = not self._in_tool_call
        tail = text[max(start, len(text) - len(self._next_marker)) :]
        cut = len(text) - partial_marker_length(tail, self._next_marker)
        (self._body_parts if self._in_tool_call else content).append(text[start:cut])
        self._marker_start = text[cut:]
        return "".join(content), calls

    def close(self) -> tuple[str, list[ParsedToolCall]]:
        """End the output. Returns the remaining content and calls."""
        rest = self._marker_start
        self._marker_start = ""
        if not self._in_tool_call:
            return rest, []
        body, known = self._take_body(rest)
        return ("" if known else self._format.begin + body), known

    @property
    def _next_marker(self) -> str:
        """The marker that ends the present part of the output; empty where its end does."""
        return self._format.end if self._in_tool_call else self._format.begin

    def _find_marker(self, text: str, start: int) -> int:
        return text.find(self._next_marker, start) if self._next_marker else -1

    def _take_body(self, rest: str) -> tuple[str, list[ParsedToolCall]]:
        """Return the text of a call, of which this is the rest, and the calls that it is; none of unknown tools."""
        body = "".join([*self._body_parts, rest])
        self._body_parts.clear()
        return body, self._parse_known_tools(body)

    def _parse_known_tools(self, text: str) -> list[ParsedToolCall]:
        calls = self._format.parse(text)
        return calls if calls and all(call.name in self._tool_names for call in calls) else []


def partial_marker_length(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that may begin the marker."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)


class TaggedAnswerParser:
    """Separates an answer that has reasoning and tool calls between tags. None: the model's template has none."""

    def __init__(self, tool_parser: ToolParser | None = None, reasoning_parser: ReasoningParser | None = None):
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def copy(self) -> TaggedAnswerParser:
        """See AnswerParser."""
        tool_parser = self._tool_parser
        reasoning_parser = self._reasoning_parser
        return TaggedAnswerParser(tool_parser and tool_parser.copy(), reasoning_parser and reasoning_parser.copy())

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """See AnswerParser."""
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

    def has_left_reasoning(self, text: str) -> bool:
        """See AnswerParser."""
        return END in text


class ChatOutputParser:
    """Separates the text of one choice, which may continue text of the prompt. By default all of it is content."""

    def __init__(self, parser: AnswerParser | None = None):
        self._parser: AnswerParser = parser or TaggedAnswerParser()
        self._skipped = ChatOutput("", "", [])  # text of the prompt that the parser may still return

    def skip(self, text: str) -> None:
        """Take text of the prompt as the beginning of the answer: only what follows is returned."""
        self._parser.feed(text, finished=False)
        self._skipped = self._parser.copy().feed("", finished=True)

    def copy(self) -> ChatOutputParser:
        """Return a parser that goes on from here by itself."""
        other = ChatOutputParser(self._parser.copy())
        other._skipped = self._skipped
        return other

    def has_left_reasoning(self, text: str) -> bool:
        """Return whether what comes after the reasoning has begun in the text of an answer."""
        return self._parser.has_left_reasoning(text)

    def feed(self, text: str, finished: bool) -> ChatOutput:
        """Add generated text. Returns the parts that are certain; all of them once the choice has finished."""
        output = self._parser.feed(text, finished)
        skipped = self._skipped
        if not any(skipped) or not any(output):
            return output
        reasoning, skipped_reasoning = _drop_skipped(output.reasoning, skipped.reasoning)
        content, skipped_content = _drop_skipped(output.content, skipped.content)
        self._skipped = ChatOutput(skipped_reasoning, skipped_content, [])
        return ChatOutput(reasoning, content, output.tool_calls)


def _drop_skipped(text: str, skipped: str) -> tuple[str, str]:
    """Return text without what its beginning shares with skipped text, and what is still to skip.

    Nothing is, where the text begins otherwise: skipped text has become part of a marker or of a call.
    """
    pairs = enumerate(zip(text, skipped, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(text), len(skipped)))
    return text[shared:], skipped[shared:] if shared else ""
