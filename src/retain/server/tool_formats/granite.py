"""Granite 3: <|tool_call|>[{"name": ..., "arguments": {...}}, ...] at the end of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects behind a marker."""

    begin: str = "<|tool_call|>"
    is_list: bool = True
    families: ClassVar[tuple[str, ...]] = ("granite", "granitemoe")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template with Granite's roles that shows tools to one, or the marker."""
        shows_tools = "<|start_of_role|>available_tools" in template or cls.begin in template
        return cls() if "<|start_of_role|>" in template and shows_tools and "<tool_call>" not in template else None
