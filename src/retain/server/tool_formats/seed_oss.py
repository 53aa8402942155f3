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
    families: ClassVar[tuple[str, ...]] = ("seed_oss",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the tag."""
        return cls() if "<seed:tool_call>" in template else None
