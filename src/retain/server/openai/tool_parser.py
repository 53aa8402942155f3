"""Tool calls in model output: detect the format that a chat template teaches, and parse calls from generated text.

Three formats are in use. Hermes and Qwen write <tool_call>{"name": ..., "arguments": {...}}</tool_call>, Mistral writes
[TOOL_CALLS] [{...}, ...], and Llama 3 writes {"name": ..., "parameters": {...}} as the whole output.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
        """Return llguidance's Lark grammar of one call of one of these functions, [{"name", "parameters"}]."""
        rules = []
        for i, tool in enumerate(tools):
            call = {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    self.arguments_key: tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            }
            schema = {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if self.is_list else call
            rules.append(f"call{i}: %json {json.dumps(schema)}")
        names = " | ".join(f"call{i}" for i in range(len(rules)))
        begin, end = (f"{json.dumps(marker)} " if marker else "" for marker in (self.begin, self.end))
        return "\n".join([f"start: {begin}calls {end}", f"calls: {names}", *rules])

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
        self._format, self._tool_names = tool_format, tool_names
        self._buffer = ""  # text that may still become part of a marker or a call
        self._in_tool_call = not tool_format.begin

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """Add generated text. Returns the text that is certainly content, and the calls that are complete."""
        self._buffer += text
        content, calls = "", []
        while self._buffer:
            if self._in_tool_call:
                if not self._format.end or self._format.end not in self._buffer:
                    break  # the call may extend to the end of the output
                body, self._buffer = self._buffer.split(self._format.end, 1)
                self._in_tool_call = False
                known = self._parse_known_tools(body)
                if known is None:
                    content += self._format.begin + body + self._format.end
                else:
                    calls += known
            else:
                before, marker, after = self._buffer.partition(self._format.begin)
                if marker:
                    content, self._buffer, self._in_tool_call = content + before, after, True
                    continue
                cut = len(before) - partial_marker_length(before, self._format.begin)
                content, self._buffer = content + before[:cut], before[cut:]
                break
        return content, calls

    def close(self) -> tuple[str, list[ParsedToolCall]]:
        """End the output. Returns the remaining content and calls."""
        rest, self._buffer = self._buffer, ""
        if not self._in_tool_call:
            return rest, []
        known = self._parse_known_tools(rest) if rest.strip() else None
        if known is not None:
            return "", known
        return (self._format.begin + rest if rest else ""), []

    def _parse_known_tools(self, text: str) -> list[ParsedToolCall] | None:
        calls = self._format.parse(text)
        return calls if calls and all(call.name in self._tool_names for call in calls) else None


def _replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which a model can write as escapes: no UTF-8 can hold them."""
    return text.encode(errors="surrogatepass").decode(errors="replace")


def partial_marker_length(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that may begin the marker."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
