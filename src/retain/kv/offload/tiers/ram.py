"""Memory beside the pool: what the pool gives up sleeps here, until somebody wants it or there is no more room.

What is asleep here is not in the pool too: who wakes it drops it. What is not known here: who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from retain.kv.offload.index import SpanIndex
from retain.kv.offload.span import MemoryReader, Span, SpanReader
from retain.plugins import Size, check_choice
from retain.types import Bytes


@dataclass(frozen=True)
class Tier:
    """Options. Raises ValueError."""

    capacity: Size
    evict: str = "lru"  # or lfu; or worth, where only what is important is loaded

    def __post_init__(self) -> None:
        check_choice("evict", self.evict, "lru", "lfu", "worth")

    def open(self) -> RamStore:
        """See `tiers.Tier`."""
        return RamStore(self)


class RamStore:
    """See `tiers.Store`."""

    name, max_keys, write_through = "ram", 4, False

    def __init__(self, options: Tier):
        self.span_index = SpanIndex(options.capacity, options.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted"), 0)
        self._lock = Lock()  # of the counts: many read at once

    def find(self, key: bytes) -> tuple[Span, int] | None:  # noqa: D102
        return self.span_index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:  # noqa: D102
        self.span_index.touch(spans)

    def contains(self, key: bytes) -> bool:  # noqa: D102
        return self.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:  # noqa: D102
        return size <= self.span_index.capacity

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:  # noqa: D102
        if replaces:
            self.span_index.remove(replaces)
        gone = self.span_index.make_room(span.size)
        if gone is not None:
            self.counts["evicted"] += len(gone)
            self.counts["written"] += span.size
            span.data = data
            self.span_index.add(span)

    def open(self, span: Span) -> SpanReader:  # noqa: D102
        assert span.data is not None  # whoever has the span has it, evicted or not
        return MemoryReader(span, span.data, self._count_read)

    def _count_read(self, num_bytes: int) -> None:
        with self._lock:
            self.counts["read"] += num_bytes

    def delete(self, span: Span, is_corrupted: bool = False) -> None:  # noqa: D102
        self.span_index.remove(span)

    def stats(self) -> dict[str, Any]:  # noqa: D102
        return {"tier": self.name, **self.span_index.stats(), **self.counts}

    def sync(self) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass
