"""DeepSeek-V3.1: a name and JSON in marks of a call; calls stand in a section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from retain.processing.template_text import COMPUTED_JSON
from retain.server.call_history import write_arguments
from retain.server.named_calls import NamedJsonFormat


@dataclass(frozen=True)
class Format(NamedJsonFormat):
    """A name, a separator and JSON. `joins_texts`: the template takes arguments as a text."""

    begin: str = "<｜tool▁call▁begin｜>"
    end: str = "<｜tool▁call▁end｜>"
    section_begin: str = "<｜tool▁calls▁begin｜>"
    section_end: str = "<｜tool▁calls▁end｜>"
    separator: str = "<｜tool▁sep｜>"
    joins_texts: bool = False
    families: ClassVar[tuple[str, ...]] = ("deepseek_v3",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes the marks, and no block of code between them."""
        return None if is_fenced(template) else cls.read(template)

    @classmethod
    def read(cls, template: str) -> Self | None:
        """Return the format of a template that writes the marks, whatever is between them."""
        joins_texts = COMPUTED_JSON not in template.partition(cls.begin)[2]
        return cls(joins_texts=joins_texts) if cls.begin in template else None

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages whose calls have their arguments as JSON text, if the template takes them so."""
        fitted = super().fit_messages(messages)
        return write_arguments(fitted) if self.joins_texts else fitted


def is_fenced(template: str) -> bool:
    """Return whether a template writes a block of code, or the kind of a call."""
    return "```json" in template or f"function{Format.separator}" in template
