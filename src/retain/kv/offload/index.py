"""An index of the spans that a tier holds: found by key, bounded in bytes, evicted by priority."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from time import time

from retain.kv.offload.span import Span


class SpanIndex:
    """Which spans a tier has: found by key, bounded in bytes.

    `by`: who goes first when room is wanted: `lru`, the longest unused; `lfu`, the least often used; `worth`, the
    lowest product of how often it was used and its share of what was looked at.
    """

    def __init__(self, capacity: int, replacement: str):
        self.capacity, self.replacement, self.used_bytes = capacity, replacement, 0
        self.by_key: dict[bytes, tuple[Span, int]] = {}
        self.spans: dict[Span, int] = {}  # and their tickets
        self.by_id: dict[int, Span] = {}
        self.heap: list[tuple[tuple[float, ...], int]] = []  # a heap of worths, perhaps old ones, and tickets
        self.id_counter = count()

    def __iter__(self) -> Iterator[Span]:
        return iter(list(self.spans))

    def stats(self) -> dict[str, int]:
        """For people."""
        return {"spans": len(self.spans), "bytes": self.used_bytes, "capacity": self.capacity}

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """The span that has the key, and which of its keys it is."""
        return self.by_key.get(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Somebody wanted them, in one go."""
        now = time()
        for span in spans:
            span.hits, span.last_used_at = span.hits + 1, now

    def priority(self, span: Span) -> tuple[float, ...]:
        """What is deeper in a text goes before what leads there."""
        recent = (span.last_used_at, -span.start_page)
        if self.replacement == "worth":
            return (span.hits * span.attention_share, *recent)
        return (span.hits, *recent) if self.replacement == "lfu" else recent

    def make_room(self, size: int, priority: tuple[float, ...] | None = None) -> list[Span] | None:
        """Evict the spans of lowest priority until `size` bytes fit, and return them. None evicts nothing: `size` can
        never fit or, for `worth`, a victim is worth more than the new span, which has `priority`.
        """
        if size > self.capacity:
            return None
        victims: list[Span] = []
        free = self.capacity - self.used_bytes
        while free < size:
            known, span_id = self.heap[0]
            span = self.by_id.get(span_id)
            if span and known != self.priority(span):
                heapq.heapreplace(self.heap, (self.priority(span), span_id))
            elif span and priority and self.replacement == "worth" and known[0] > priority[0]:
                for victim in victims:
                    heapq.heappush(self.heap, (self.priority(victim), self.spans[victim]))
                return None
            else:
                heapq.heappop(self.heap)
                if span:
                    victims.append(span)
                    free += span.size
        for victim in victims:
            self.remove(victim)
        return victims

    def add(self, span: Span) -> None:
        """There is room for it."""
        self.by_key |= {key: (span, i) for i, key in enumerate(span.keys)}
        self.spans[span] = ticket = next(self.id_counter)
        self.by_id[ticket] = span
        self.used_bytes += span.size
        if len(self.heap) > 2 * len(self.spans) + 64:  # most of whom are gone
            self.heap = [(self.priority(s), t) for s, t in self.spans.items()]
            heapq.heapify(self.heap)
        else:
            heapq.heappush(self.heap, (self.priority(span), ticket))

    def remove(self, span: Span) -> bool:
        """Whether it was there."""
        ticket = self.spans.pop(span, None)
        if ticket is None:
            return False
        del self.by_id[ticket]
        self.used_bytes -= span.size
        for key in span.keys:
            if key in self.by_key and self.by_key[key][0] is span:
                del self.by_key[key]
        return True
