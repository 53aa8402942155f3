"""The RAM tier: host memory beside the pool, for pages that the pool evicts.

Its spans are not in the pool at the same time: a span that was loaded is deleted here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any

from retain.kv.stores.index import SpanIndex
from retain.kv.stores.span import UNKNOWN_FORMAT, MemoryReader, Span, SpanFormat, SpanReader
from retain.options import Size, check_bounds
from retain.plugins import check_choice
from retain.types import Bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tier:
    """Options of the RAM tier. Raises ValueError."""

    capacity: Size
    evict: str = "lru"  # or lfu; or importance, with selective loading

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("evict", self.evict, "lru", "lfu", "importance")

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> RamStore:
        """Open an empty store."""
        return RamStore(self)


class RamStore:
    """A store in host memory. See `Store` for its methods."""

    name = "ram"
    max_keys = 4
    write_through = False
    is_shared = False
    distance = 0
    latency = 0.0

    def __init__(self, options: Tier):
        self.formats: dict[bytes, dict[str, Any]] = {}
        self.span_index = SpanIndex(options.capacity, options.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted"), 0)
        self._lock = Lock()  # for the counts: several threads read at once
        log.info("tier ram: opened with %.1f MiB", options.capacity / 2**20)

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""
        return self.span_index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans."""
        self.span_index.touch(spans)

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return no limit: memory does not fail."""
        return inf

    def contains(self, key: bytes) -> bool:
        """Whether a span has the key."""
        return self.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:
        """Whether a span of this many bytes fits at all."""
        return size <= self.span_index.capacity

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Keep a span."""
        if not self.accepts(span.size):
            return
        if replaces:
            self.span_index.remove(replaces)
        victims = self.span_index.make_room(span.size) or []
        self.counts["evicted"] += len(victims)
        self.counts["written"] += span.size
        span.data = data
        self.span_index.add(span)

    def open(self, span: Span, deadline: float = inf) -> SpanReader:
        """Open a span; the reader keeps its bytes, even if the store evicts it."""
        assert span.data is not None
        return MemoryReader(span, span.data, self._count_read)

    def _count_read(self, num_bytes: int) -> None:
        with self._lock:
            self.counts["read"] += num_bytes

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Remove a span."""
        self.span_index.remove(span)

    def stats(self) -> dict[str, Any]:
        """Return spans, bytes and capacity, and the counts since the store was opened."""
        return {"tier": self.name, **self.span_index.stats(), **self.counts}

    def sync(self) -> None:
        """Do nothing: spans are kept at once."""

    def close(self) -> None:
        """Log the counts."""
        log.info("tier ram: closed with %d spans; %s", len(self.span_index.spans), self.counts)
