"""Tool calls in a model's own words: what its template teaches it to write, told apart from what it says.

Three ways are in use: Hermes' and Qwen's <tool_call>{"name": ..., "arguments": {...}}</tool_call>, Mistral's
[TOOL_CALLS] [{...}, ...], and Llama 3's {"name": ..., "parameters": {...}} as the whole answer. What is not known here:
HTTP, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParsedToolCall:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: between `begin` and `end`; both empty: they are the whole answer."""

    begin: str
    end: str
    arguments_key: str = "arguments"  # the key
    is_list: bool = False  # a list of them

    def build_grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """One call of one of these functions, [{"name", "parameters"}], in llguidance's Lark."""
        each = []
        for tool in tools:
            about = {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    self.arguments_key: tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            }
            wanted = {"type": "array", "items": about, "minItems": 1, "maxItems": 1} if self.is_list else about
            each.append(f"%json {json.dumps(wanted)}")
        rules = "\n".join(f"call{i}: {rule}" for i, rule in enumerate(each))
        names = " | ".join(f"call{i}" for i in range(len(each)))
        begin, end = (f"{json.dumps(x)} " if x else "" for x in (self.begin, self.end))
        return f"start: {begin}calls {end}\ncalls: {names}\n{rules}"

    def parse(self, text: str) -> list[ParsedToolCall] | None:
        """The calls that are written between `begin` and `end`; None where it is something else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                return None
            given = each.get(self.arguments_key, each.get("arguments", each.get("parameters", {})))
            calls.append(
                ParsedToolCall(each["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            )
        return calls or None


def detect_tool_format(template: str) -> ToolFormat | None:
    """What a template teaches; None where it knows no tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in template:
        return ToolFormat("[TOOL_CALLS]", "", is_list=True)
    return ToolFormat("", "", arguments_key="parameters" if '"parameters"' in template else "arguments")


class ToolParser:
    """Hears an answer as it comes, and tells what is said from what is called. What calls none of `tools` is said."""

    def __init__(self, tool_format: ToolFormat, tool_names: Collection[str]):
        self._tool_format, self._tool_names, self._buffer, self._in_tool_call = (
            tool_format,
            tool_names,
            "",
            not tool_format.begin,
        )

    def feed(self, text: str) -> tuple[str, list[ParsedToolCall]]:
        """More of the answer: what of it is certainly said, and calls that are complete."""
        self._buffer += text
        said, calls = "", []
        while self._buffer:
            if self._in_tool_call:
                if not self._tool_format.end or self._tool_format.end not in self._buffer:
                    break  # to the end of the answer
                body, self._buffer = self._buffer.split(self._tool_format.end, 1)
                self._in_tool_call = False
                found = self._parse_known_tools(body)
                if found is None:
                    said += self._tool_format.begin + body + self._tool_format.end
                else:
                    calls += found
            else:
                before, begin, after = self._buffer.partition(self._tool_format.begin)
                if begin:
                    said, self._buffer, self._in_tool_call = said + before, after, True
                    continue
                cut = len(before) - _partial_marker_length(before, self._tool_format.begin)
                said, self._buffer = said + before[:cut], before[cut:]
                break
        return said, calls

    def close(self) -> tuple[str, list[ParsedToolCall]]:
        """The answer has ended."""
        held, self._buffer = self._buffer, ""
        if not self._in_tool_call:
            return held, []
        found = self._parse_known_tools(held) if held.strip() else None
        if found is not None:
            return "", found
        return (self._tool_format.begin + held if held else ""), []

    def _parse_known_tools(self, text: str) -> list[ParsedToolCall] | None:
        calls = self._tool_format.parse(text)
        return calls if calls and all(c.name in self._tool_names for c in calls) else None


def _partial_marker_length(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
