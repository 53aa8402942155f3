"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] at the end of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retain.server.call_history import shorten_ids
from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """A list of objects behind a marker."""

    begin: str = "[TOOL_CALLS]"
    is_list: bool = True
    shown: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    not_shown: ClassVar[tuple[str, ...]] = ("[ARGS]",)
    families: ClassVar[tuple[str, ...]] = ("mistral",)

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with ids of calls of nine characters: templates refuse ids of another length."""
        return shorten_ids(super().fit_messages(messages))
