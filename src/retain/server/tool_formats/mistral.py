"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] at the end of the output."""

from __future__ import annotations

from dataclasses import dataclass

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects behind a marker."""

    begin: str = "[TOOL_CALLS]"
    is_list: bool = True

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that shows the marker."""
        return cls() if "[TOOL_CALLS]" in template else None
