"""Ministral 3 and Magistral: [TOOL_CALLS]NAME[ARGS]{...} for each call, at the end of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.server.call_history import shorten_ids
from retain.server.named_calls import NamedJsonFormat


@dataclass(frozen=True)
class Format(NamedJsonFormat):
    """A name and an object behind a marker each. `has_thoughts`: content may have blocks of reasoning."""

    begin: str = "[TOOL_CALLS]"
    separator: str = "[ARGS]"
    id_mark: str = "[CALL_ID]"
    has_thoughts: bool = False
    families: ClassVar[tuple[str, ...]] = ("ministral3", "mistral")

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format of a template that writes both markers."""
        if "[TOOL_CALLS]" not in template or "[ARGS]" not in template:
            return None
        return cls(has_thoughts="[/THINK]" in template)

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with ids of nine characters: templates refuse ids of another length.

        Reasoning becomes blocks of content if the template reads it there.
        """
        fitted = shorten_ids(super().fit_messages(messages))
        return list(map(_move_reasoning, fitted)) if self.has_thoughts else fitted


def _move_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    content = message.get("content")
    texts = [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *texts]}
