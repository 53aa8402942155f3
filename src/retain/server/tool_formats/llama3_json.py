"""Llama 3, and models whose template shows no marker: {"name": ..., "parameters": {...}}, alone or behind text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retain.server.call_history import split_calls
from retain.server.call_scanner import CallScanner, Scanned, ValueScanner
from retain.server.tool_format import JsonToolFormat

MARKER = "<|python_tag|>"
# An object with a name and arguments that follows words, or what a template computes: no marker precedes it.
SHOWN_CALL = re.compile(
    r"""[\w.:…][ \t]+\{\s*["']name["']\s*:[^{}]*["'](parameters|arguments)["']\s*:"""
    r"""|(?:^|\})\s*\{\s*["']name["']\s*:[^{}]*["'](parameters|arguments)["']\s*:"""
)
HEADS = tuple(f'{begin}"{key}"' for begin in ("{", "[{") for key in ("name", "type", "function", "parameters"))
MAX_HEAD = 64  # characters that may be blank before it is known what an object is


@dataclass(frozen=True)
class Format(JsonToolFormat):
    """One object, several with semicolons between them, or a list of them."""

    begin: str = ""
    arguments_key: str = "parameters"
    families: ClassVar[tuple[str, ...]] = ("llama",)

    @classmethod
    def from_template(cls, template: str) -> Format | None:
        """Return the format with the key of arguments that a template shows."""
        shown = SHOWN_CALL.search(template)
        return cls(arguments_key=shown[1]) if shown else None

    @property
    def begins(self) -> tuple[str, ...]:
        """Return the only marker that may begin a call, <|python_tag|>."""
        return (MARKER,)

    @property
    def bare_begins(self) -> tuple[str, ...]:
        """Return the brackets that begin a call without a marker; they belong to its JSON."""
        return ("{", "[")

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the semicolon, which separates calls."""
        return (";",)

    def fit_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with one call each: the published templates take no more."""
        return split_calls(super().fit_messages(messages))

    def create_scanner(self, begin: str) -> CallScanner:
        """Create the scanner of a call: JSON that begins as that of a call does, other braces are text."""
        return HeadScanner(self.ends, self.begins)


@dataclass
class HeadScanner(ValueScanner):
    """Ends a call where its JSON value ends, if the value begins as one of a call does."""

    is_value: bool = field(default=False, kw_only=True)

    def scan(self, text: str, start: int, finished: bool) -> Scanned:
        """Read the JSON value from `start` on, if its first key is one of a call; otherwise report that it is text."""
        if not self.is_value:
            shown = text[start : start + MAX_HEAD]
            head = "".join(shown.split())
            self.is_value = head.startswith(HEADS)
            is_open = len(shown) < MAX_HEAD and not finished and any(whole.startswith(head) for whole in HEADS)
            if not self.is_value:
                return Scanned.more(start) if is_open else Scanned.text(start + 1)
        return super().scan(text, start, finished)
