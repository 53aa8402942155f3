"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them within other text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from retain.server.tool_format import JsonToolFormat

SHOWN_CALL = re.compile(r"""<tool_call>\s*\{(\s*["'](name|arguments)["']|…\}\s*</tool_call>)""")


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """An object between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    families: ClassVar[tuple[str, ...]] = (
        *("ernie4_5", "granite", "granitemoehybrid", "llama", "qwen2"),
        *("qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
    )

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the tag with an object behind it."""
        return cls() if SHOWN_CALL.search(template) else None
