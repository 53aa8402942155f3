"""Memory beside the pool: what the pool gives up sleeps here, until somebody wants it or there is no more room.

What is asleep here is not in the pool too: who wakes it drops it. What is not known here: who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from retain.config import Size, one_of
from retain.kv.span import Bytes, Held, Shelf, Span
from retain.kv.tiers import Reader


@dataclass(frozen=True)
class Tier:
    """Options. Raises ValueError."""

    capacity: Size
    evict: str = "lru"  # or lfu; or worth, where only what is important is loaded

    def __post_init__(self) -> None:
        one_of("evict", self.evict, "lru", "lfu", "worth")

    def open(self) -> Ram:
        """See `tiers.Tier`."""
        return Ram(self)


class Ram:
    """See `tiers.Store`."""

    name, most, replica = "ram", 4, False

    def __init__(self, chosen: Tier):
        self.shelf = Shelf(chosen.capacity, chosen.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted"), 0)
        self.guard = Lock()  # of the counts: many read at once

    def find(self, key: bytes) -> tuple[Span, int] | None:  # noqa: D102
        return self.shelf.find(key)

    def touch(self, spans: Sequence[Span]) -> None:  # noqa: D102
        self.shelf.touch(spans)

    def has(self, key: bytes) -> bool:  # noqa: D102
        return self.shelf.find(key) is not None

    def wants(self, size: int) -> bool:  # noqa: D102
        return size <= self.shelf.capacity

    def keep(self, span: Span, data: Bytes, instead: Span | None = None) -> None:  # noqa: D102
        if instead:
            self.shelf.remove(instead)
        gone = self.shelf.room(span.size)
        if gone is not None:
            self.counts["evicted"] += len(gone)
            self.counts["written"] += span.size
            span.data = data
            self.shelf.add(span)

    def open(self, span: Span) -> Reader:  # noqa: D102
        assert span.data is not None  # whoever has the span has it, evicted or not
        return Held(span, span.data, self._read)

    def _read(self, size: int) -> None:
        with self.guard:
            self.counts["read"] += size

    def drop(self, span: Span, damaged: bool = False) -> None:  # noqa: D102
        self.shelf.remove(span)

    def told(self) -> dict[str, Any]:  # noqa: D102
        return {"tier": self.name, **self.shelf.told(), **self.counts}

    def sync(self) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass
