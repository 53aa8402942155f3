"""The RAM tier: host memory beside the pool, for pages that the pool evicts.

Its spans are not in the pool at the same time: a span that was loaded is deleted here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from retain.kv.stores.bucket import HeldObject, Memory
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.span import UNKNOWN_FORMAT, Span, SpanFormat
from retain.kv.stores.store import Store
from retain.options import Size, check_bounds
from retain.plugins import check_choice
from retain.types import Bytes


@dataclass(frozen=True)
class Tier:
    """Options of the RAM tier. Raises ValueError."""

    capacity: Size
    evict: str = "lru"  # or lfu; or importance, with selective loading

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("evict", self.evict, "lru", "lfu", "importance")

    def of_rank(self, rank: int, size: int) -> Tier:
        """Return the tier of a rank: its part of the capacity."""
        return replace(self, capacity=self.capacity // size)

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> RamStore:
        """Open a store in RAM, which is empty at first."""
        return RamStore(self)


class RamStore(Store):
    """A store in host memory. Spans are kept at once, without a header: they outlive nothing."""

    name = "ram"
    max_keys = 4
    write_through = False
    distance = 0

    def __init__(self, options: Tier):
        super().__init__(Memory(), UNKNOWN_FORMAT, options.capacity, options.evict)
        self._log_event("opened")

    def _submit(self, task: Callable[..., None], *args: Any) -> None:
        with self._lock:
            task(*args)

    def _encode(self, span: Span, data: Bytes) -> tuple[bytes, Span]:
        span.name = b"".join(span.keys).hex()
        span.data = data
        return b"", span

    def open(self, span: Span, deadline: float = inf) -> SpanReader:
        """Open a span for reading, also one that was evicted since it was found, to make room for its own load."""
        assert span.data is not None
        opened = HeldObject(span.data, span.last_used_at)
        return SpanReader(span, partial(self._read, opened.read), opened.close)
