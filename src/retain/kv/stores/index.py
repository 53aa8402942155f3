"""The index of a tier: its spans by key, the bytes that they take, and their order of eviction."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import chain, count
from math import inf
from time import time

from retain.kv.stores.span import Span


class SpanIndex:
    """The spans of a tier with a capacity in bytes.

    `replacement` says which spans are evicted first. `lru`: the least recently used. `lfu`: the least often used.
    `importance`: those with the lowest product of uses and share of attention.
    """

    def __init__(self, capacity: int, replacement: str):
        self.capacity = capacity
        self.replacement = replacement
        self.used_bytes = 0
        self.by_key: dict[bytes, tuple[Span, int]] = {}  # the newest span that has the key
        self.older: dict[bytes, list[tuple[Span, int]]] = {}  # the others, found once that one is removed
        self.spans: dict[Span, int] = {}  # with their ids
        self.by_id: dict[int, Span] = {}
        # Pairs of a priority and a span's id. Uses only raise a priority, so an outdated pair comes out too early,
        # never too late: `make_room` renews it then.
        self.heap: list[tuple[tuple[float, ...], int]] = []
        self.id_counter = count()

    def stats(self) -> dict[str, int]:
        """Return the number of spans, their bytes and the capacity."""
        return {"spans": len(self.spans), "bytes": self.used_bytes, "capacity": self.capacity}

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""
        return self.by_key.get(key)

    def spans_of(self, keys: Collection[bytes]) -> set[Span]:
        """Return all spans that have one of these keys."""
        newest = [self.by_key[key] for key in keys if key in self.by_key]
        return {span for span, _ in chain(newest, *(self.older.get(key, ()) for key in keys))}

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans, at the same time for all."""
        now = time()
        for span in spans:
            span.hits = span.hits + 1
            span.last_used_at = now

    def priority(self, span: Span) -> tuple[float, ...]:
        """Return the priority of a span. Among equals, the span that is deeper in its text is evicted first."""
        recent = (span.last_used_at, -span.start_page)
        if self.replacement == "importance":
            return (span.hits * span.attention_share, *recent)
        return (span.hits, *recent) if self.replacement == "lfu" else recent

    def make_room(
        self, size: int, priority: tuple[float, ...] | None = None, replaces: Span | None = None
    ) -> list[Span] | None:
        """Evict the spans of lowest priority until `size` bytes fit, and return them.

        None, with nothing evicted, if `size` exceeds the capacity. The same under `importance` if a victim is more
        important than the new span, whose `priority` is given. The bytes of the span that it `replaces` count as free;
        that span is no victim, and stays until the caller removes it.
        """
        if size > self.capacity:
            return None
        free = self.capacity - self.used_bytes + (replaces.size if replaces in self.spans else 0)
        popped: list[Span] = []  # from the heap, to be put back where they stay
        while free < size:
            known, span_id = heapq.heappop(self.heap)
            span = self.by_id.get(span_id)
            if span and known != self.priority(span):
                heapq.heappush(self.heap, (self.priority(span), span_id))
            elif span:
                popped.append(span)
                free += 0 if span is replaces else span.size
        victims = [span for span in popped if span is not replaces]
        least = priority[0] if priority and self.replacement == "importance" else inf
        is_refused = any(self.priority(victim)[0] > least for victim in victims)
        for span in popped:
            if is_refused or span is replaces:
                heapq.heappush(self.heap, (self.priority(span), self.spans[span]))
        if is_refused:
            return None
        for victim in victims:
            self.remove(victim)
        return victims

    def add(self, span: Span) -> None:
        """Add a span, for which `make_room` has made room."""
        for i, key in enumerate(span.keys):
            if known := self.by_key.get(key):
                self.older.setdefault(key, []).append(known)
            self.by_key[key] = (span, i)
        self.spans[span] = span_id = next(self.id_counter)
        self.by_id[span_id] = span
        self.used_bytes += span.size
        if len(self.heap) > 2 * len(self.spans) + 64:  # most pairs are of spans that were removed
            self.heap = [(self.priority(s), i) for s, i in self.spans.items()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (self.priority(span), span_id))

    def remove(self, span: Span) -> bool:
        """Remove a span. Whether it was in the index."""
        span_id = self.spans.pop(span, None)
        if span_id is None:
            return False
        del self.by_id[span_id]
        self.used_bytes -= span.size
        for key in span.keys:
            self._forget_key(key, span)
        return True

    def _forget_key(self, key: bytes, span: Span) -> None:
        """Find other spans by a key of a span that is removed."""
        others = [known for known in self.older.pop(key, []) if known[0] is not span]
        if self.by_key[key][0] is span:
            if not others:
                del self.by_key[key]
                return
            self.by_key[key] = others.pop()
        if others:
            self.older[key] = others
