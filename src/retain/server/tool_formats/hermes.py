"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them within other text."""

from __future__ import annotations

from dataclasses import dataclass

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """An object between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that shows the tag."""
        return cls() if "<tool_call>" in template else None
