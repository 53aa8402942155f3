"""Qwen3-Coder, Qwen3.5 and Nemotron 3: <tool_call> with <function=NAME> and <parameter=NAME>VALUE</parameter>.

The tags stand on lines of their own, and values are texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.tagged_calls import FunctionTagFormat


@dataclass(frozen=True)
class Format(FunctionTagFormat):
    """A function with tags for its parameters between two tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    shown: ClassVar[tuple[str, ...]] = ("<tool_call>\n<function=",)
    families: ClassVar[tuple[str, ...]] = (
        *("nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next"),
    )
