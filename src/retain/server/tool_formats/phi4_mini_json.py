"""Phi-4-mini: <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects between two markers."""

    begin: str = "<|tool_call|>"
    end: str = "<|/tool_call|>"
    is_list: bool = True
    families: ClassVar[tuple[str, ...]] = ("phi3",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that shows tools between its marks."""
        return cls() if "<|tool|>" in template and "<|/tool|>" in template else None
