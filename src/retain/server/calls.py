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
class Call:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Way:
    """How calls are written: between `begin` and `end`; both empty: they are the whole answer."""

    begin: str
    end: str
    arguments: str = "arguments"  # the key
    many: bool = False  # a list of them

    def grammar(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """One call of one of these functions, [{"name", "parameters"}], in llguidance's Lark."""
        each = []
        for tool in tools:
            about = {
                "type": "object",
                "properties": {
                    "name": {"const": tool["name"]},
                    self.arguments: tool.get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            wanted = {"type": "array", "items": about, "minItems": 1, "maxItems": 1} if self.many else about
            each.append(f"%json {json.dumps(wanted)}")
        rules = "\n".join(f"call{i}: {rule}" for i, rule in enumerate(each))
        names = " | ".join(f"call{i}" for i in range(len(each)))
        begin, end = (f"{json.dumps(x)} " if x else "" for x in (self.begin, self.end))
        return f"start: {begin}calls {end}\ncalls: {names}\n{rules}"

    def read(self, text: str) -> list[Call] | None:
        """The calls that are written between `begin` and `end`; None where it is something else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                return None
            given = each.get(self.arguments, each.get("arguments", each.get("parameters", {})))
            calls.append(Call(each["name"], given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)))
        return calls or None


def way(template: str) -> Way | None:
    """What a template teaches; None where it knows no tools."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return Way("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in template:
        return Way("[TOOL_CALLS]", "", many=True)
    return Way("", "", arguments="parameters" if '"parameters"' in template else "arguments")


class Ear:
    """Hears an answer as it comes, and tells what is said from what is called. What calls none of `tools` is said."""

    def __init__(self, way: Way, tools: Collection[str]):
        self._way, self._tools, self._held, self._inside = way, tools, "", not way.begin

    def hear(self, text: str) -> tuple[str, list[Call]]:
        """More of the answer: what of it is certainly said, and calls that are complete."""
        self._held += text
        said, calls = "", []
        while self._held:
            if self._inside:
                if not self._way.end or self._way.end not in self._held:
                    break  # to the end of the answer
                body, self._held = self._held.split(self._way.end, 1)
                self._inside = False
                found = self._read(body)
                if found is None:
                    said += self._way.begin + body + self._way.end
                else:
                    calls += found
            else:
                before, begin, after = self._held.partition(self._way.begin)
                if begin:
                    said, self._held, self._inside = said + before, after, True
                    continue
                cut = len(before) - _overlap(before, self._way.begin)
                said, self._held = said + before[:cut], before[cut:]
                break
        return said, calls

    def close(self) -> tuple[str, list[Call]]:
        """The answer has ended."""
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        found = self._read(held) if held.strip() else None
        if found is not None:
            return "", found
        return (self._way.begin + held if held else ""), []

    def _read(self, text: str) -> list[Call] | None:
        calls = self._way.read(text)
        return calls if calls and all(c.name in self._tools for c in calls) else None


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
