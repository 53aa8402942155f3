"""LFM2: <|tool_call_start|>[NAME(parameter="value", ...), ...]<|tool_call_end|>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.python_calls import PythonToolFormat


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
        """Return the format of a template that shows a list of tools between its marks, or writes the marker."""
        return cls() if "<|tool_list_start|>" in template or cls.begin in template else None
