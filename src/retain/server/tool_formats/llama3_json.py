"""Llama 3, and models whose template shows no marker: {"name": ..., "parameters": {...}} as the whole output."""

from __future__ import annotations

from dataclasses import dataclass

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """One object, or a list of them, and nothing else."""

    @classmethod
    def from_template(cls, template: str) -> Format:
        """Return the format with the key of arguments that a template shows."""
        return cls(arguments_key="parameters" if '"parameters"' in template else "arguments")
