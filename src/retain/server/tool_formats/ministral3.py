"""Ministral 3 and Magistral: [TOOL_CALLS]NAME[ARGS]{...} for each call, at the end of the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.named_calls import NamedJsonFormat


@dataclass(frozen=True)
class Format(NamedJsonFormat):
    """A name and an object behind a marker each."""

    begin: str = "[TOOL_CALLS]"
    separator: str = "[ARGS]"
    id_mark: str = "[CALL_ID]"
    families: ClassVar[tuple[str, ...]] = ("ministral3", "mistral")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes both markers."""
        return cls() if "[TOOL_CALLS]" in template and "[ARGS]" in template else None
