"""Tiers: where pages sleep that the pool has no room for, or that shall outlive the process. One tier is one file here,
found by its name: `parse("disk:path=store,capacity=50GiB")`.

A file defines `class Tier`, a frozen dataclass whose fields are its options on the command line, with `open()`, which
gives a `Store`. What is not known here: texts, requests, what K and V look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from retain.kv.offload.span import Bytes, Span
from retain.plugins import load_plugin, parse_spec, plugin_names


class Tier(Protocol):
    """What can be chosen of a tier."""

    def open(self) -> Store:
        """The store. Raises ValueError where it cannot be used, OSError where it cannot be reached."""
        ...


class Store(Protocol):
    """Spans that sleep. Every method may be called while others read; none but `open` raises."""

    name: str  # the tier's
    max_keys: int  # keys of a span
    write_through: bool  # whether it wants everything as soon as it is computed, or what the pool gives up

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """The span that has the key, and which of its keys it is."""
        ...

    def touch(self, spans: Sequence[Span]) -> None:
        """Somebody wanted them."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether somebody has the key, or will soon."""
        ...

    def accepts(self, size: int) -> bool:
        """Whether it would keep a span of so many bytes."""
        ...

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Keep a span, now or in the background, `instead` of another with its keys; `data` [span.size] is given away.

        Who reads the other goes on.
        """
        ...

    def open(self, span: Span) -> SpanReader:
        """Its bytes, whatever becomes of it meanwhile. Raises OSError."""
        ...

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """It is not kept any more."""
        ...

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, for people: spans, bytes, capacity, and counts since it was opened."""
        ...

    def sync(self) -> None:
        """Wait until everything that was kept is where it stays."""
        ...

    def close(self) -> None:
        """Finish what was begun and let others open it."""
        ...


class SpanReader(Protocol):
    """An open span. Raises OSError where it cannot be read, and Damaged where it is not what was kept."""

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Of one of its layers, [end - begin, row_bytes]; good until this thread reads again."""
        ...

    def read_metadata(self) -> Bytes:
        """Good until this thread reads again."""
        ...

    def close(self) -> None:
        """It is not read any more."""
        ...


class CorruptionError(OSError):
    """What was read is not what was written."""


def names() -> list[str]:
    """The tiers in this folder."""
    return plugin_names(__name__)


def parse_all(specs: Sequence[str]) -> list[Tier]:
    """The tiers that these texts name, one of each. Raises ValueError."""
    named = [parse_spec(text)[0] for text in specs]
    if twice := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"tier {twice[0]!r} is named twice: give one of each")
    return [parse(text) for text in specs]


def parse(spec: str) -> Tier:
    """The tier that a text names. Raises ValueError with what is allowed."""
    tier: Tier = load_plugin(__name__, "Tier", "tier", spec)
    return tier
