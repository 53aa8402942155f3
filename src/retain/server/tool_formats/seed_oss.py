"""Seed-OSS: <seed:tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></seed:tool_call>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.tagged_calls import FunctionTagFormat


@dataclass(frozen=True)
class Format(FunctionTagFormat):
    """A function with tags for its parameters between two tags. Values have no lines of their own."""

    begin: str = "<seed:tool_call>"
    end: str = "</seed:tool_call>"
    value_break: str = ""
    shown: ClassVar[tuple[str, ...]] = ("<seed:tool_call>",)
    families: ClassVar[tuple[str, ...]] = ("seed_oss",)
