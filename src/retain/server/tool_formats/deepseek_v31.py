"""DeepSeek-V3.1: a name and JSON in marks of a call; calls stand in a section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retain.server.named_calls import NamedJsonFormat


@dataclass(frozen=True)
class Format(NamedJsonFormat):
    """A name, a separator and JSON."""

    begin: str = "<｜tool▁call▁begin｜>"
    end: str = "<｜tool▁call▁end｜>"
    section_begin: str = "<｜tool▁calls▁begin｜>"
    section_end: str = "<｜tool▁calls▁end｜>"
    separator: str = "<｜tool▁sep｜>"
    families: ClassVar[tuple[str, ...]] = ("deepseek_v3",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the marks, and no block of code between them."""
        is_fenced = "```json" in template or f"function{cls.separator}" in template
        return cls() if cls.begin in template and not is_fenced else None
