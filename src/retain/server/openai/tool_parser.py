"""Tool calls in model output: detect the format that a chat template teaches, and parse calls from generated text.

Three formats are in use. Hermes and Qwen write <tool_call>{"name": ..., "arguments": {...}}</tool_call>, Mistral writes
[TOOL_CALLS] [{...}, ...], and Llama 3 writes {"name": ..., "parameters": {...}} as the whole output.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from retain.processing.grammar import lark_json_rule


@dataclass(frozen=True)
class ParsedToolCall:
    """A function's name and its JSON-encoded arguments."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: between two markers, or as the whole output if the markers are empty."""

    begin: str
    end: str
    arguments_key: str = "arguments"
    is_list: bool = False  # a list of calls between the markers

    def build_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return llguidance's Lark grammar of one call of one of these functions, [{"name", "parameters"}].

        The parameters are rules of their own rather than parts of a larger schema, where their references to their
        root would lead elsewhere. Raises ValueError for a schema that is too deep or that no value matches.
        """
        begin, end = (json.dumps(marker) if marker else "" for marker in (self.begin, self.end))
        names = " | ".join(f"call{i}" for i in range(len(tools)))
        calls = '"[" ws? call ws? "]"' if self.is_list else "call"
        between = f"ws? {calls} ws?" if end else f"ws? {calls}" if begin else calls
        rules = [
            f"start: {begin} {between} {end}",
            f"call: {names}",
            r"ws: /[ \t\r\n]{1,8}/",  # bounded: small models would write blanks for ever
        ]
        for i, tool in enumerate(tools):
            members = f'{self._lark_key("name")} name{i} ws? "," ws? {self._lark_key(self.arguments_key)} arguments{i}'
            rules += [
                f'call{i}: "{{" ws? {members} ws? "}}"',
                lark_json_rule(f"name{i}", {"const": tool["name"]}),
                lark_json_rule(f"arguments{i}", tool.get("parameters") or {"type": "object"}),
            ]
        return "\n".join(rules)

    @staticmethod
    def _lark_key(key: str) -> str:
        return f'{json.dumps(json.dumps(key))} ws? ":" ws?'

    def parse(self, text: str) -> list[ParsedToolCall] | None:
        """Parse the text between the markers. Returns None if it is no tool call."""
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return None
            arguments = call.get(self.arguments_key, call.get("arguments", call.get("parameters", {})))
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(ParsedToolCall(call["name"], _replace_surrogates(arguments)))
        return calls or None


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, or None if the template does not support tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in template:
        return ToolFormat("[TOOL_CALLS]", "", is_list=True)
    return ToolFormat("", "", arguments_key="parameters" if '"parameters"' in template else "arguments")


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


def _replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which a model can write as escapes: no UTF-8 can hold them."""
    return text.encode(errors="surrogatepass").decode(errors="replace")


def partial_marker_length(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that may begin the marker."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
