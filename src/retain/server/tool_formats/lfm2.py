"""LFM2: <|tool_call_start|>[NAME(parameter="value", ...), ...]<|tool_call_end|>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.python_calls import PythonToolFormat

TOOL_LISTS = ("<|tool_list_start|>", "List of tools: [")


@dataclass(frozen=True)
class Format(PythonToolFormat):
    """A list of Python's calls between two markers."""

    begin: str = "<|tool_call_start|>"
    end: str = "<|tool_call_end|>"
    opener: str = "["
    closer: str = "]"
    separator: str = ","
    families: ClassVar[tuple[str, ...]] = ("lfm2", "lfm2_moe")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the marker, or a list of tools as LFM2's and LFM2.5's do."""
        return cls() if any(text in template for text in (cls.begin, *TOOL_LISTS)) else None
