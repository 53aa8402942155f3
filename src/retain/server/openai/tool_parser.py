"""Tool calls in generated text: separate them from content, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from retain.server.tool_format import ParsedToolCall, ToolFormat


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
        return (self._format.begin + body if body and not known else ""), known

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
