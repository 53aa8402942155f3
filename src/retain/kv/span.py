"""What sleeps in tiers: spans of a text, layer by layer, and which of them go first when a tier is full.

A row is a page of every kv head of one layer, G times K and then V, as bytes. A span of text has as many rows in every
layer as it has keys: key i, the chained hash of a whole page of tokens, names row i of each. Windows of sliding layers
are a span of one key and as many rows in each layer as its window takes. What is not known here: where spans lie.
"""

from __future__ import annotations

import heapq
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from time import time

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
BLOCK = 4096  # layers begin at multiples of it, as direct reads want it


@dataclass(eq=False)
class Span:
    """Rows that sleep together; in bytes the layers lie one behind the other."""

    keys: tuple[bytes, ...]
    rows: tuple[int, ...]  # of each layer
    row_bytes: int
    begin: int = 0  # pages of its text before it
    firsts: tuple[int, ...] = ()  # windows: the page of the text with which each layer begins
    least: int = 0  # windows: the first position from which texts can go on
    notes: int = 0  # bytes, behind the layers: see kv/importance.py
    packed: bool = False  # tokens of a layer lie in the order that the notes say, not in that of the text
    hits: int = 1  # how often somebody wanted it
    used: float = 0.0  # when, the last time (seconds since 1970)
    data: Bytes | None = None  # all of it, where it is in memory
    share: float = 1.0  # of what was looked at, beside others

    def __post_init__(self) -> None:
        self.used = self.used or time()
        sizes = [*(n * self.row_bytes for n in self.rows), self.notes]
        self.begins = [0, *accumulate(-(-n // BLOCK) * BLOCK for n in sizes)]  # of layers, of the notes, and the end

    @property
    def size(self) -> int:
        """Bytes, with what fills up blocks."""
        return self.begins[-1]

    def of(self, data: Bytes, layer: int) -> Bytes:
        """The rows of a layer in all its bytes: a view, [rows, row_bytes]."""
        begin, n = self.begins[layer], self.rows[layer]
        return data[begin : begin + n * self.row_bytes].reshape(n, self.row_bytes)


@dataclass(frozen=True)
class Held:
    """A span in memory, to be read. See `tiers.Reader`."""

    span: Span
    data: Bytes
    told: Callable[[int], None] | None = None  # how many bytes were read

    def rows(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        if self.told:
            self.told((end - begin) * self.span.row_bytes)
        return self.span.of(self.data, layer)[begin:end]

    def notes(self) -> Bytes:  # noqa: D102
        at = self.span.begins[-2]
        return self.data[at : at + self.span.notes]

    def close(self) -> None:  # noqa: D102
        pass


def blocks(size: int) -> Bytes:
    """So many bytes of zeros, at a multiple of BLOCK in memory."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def unbound() -> None:
    """This thread may run on any core: it would inherit the one that OpenMP has bound its parent to."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Shelf:
    """Which spans a tier has: found by key, bounded in bytes.

    `by`: who goes first when room is wanted: `lru`, the longest unused; `lfu`, the least often used; `worth`, the
    lowest product of how often it was used and its share of what was looked at.
    """

    def __init__(self, capacity: int, by: str):
        self.capacity, self.by, self.bytes = capacity, by, 0
        self.places: dict[bytes, tuple[Span, int]] = {}
        self.spans: dict[Span, int] = {}  # and their tickets
        self.tickets: dict[int, Span] = {}
        self.queue: list[tuple[tuple[float, ...], int]] = []  # a heap of worths, perhaps old ones, and tickets
        self.count = count()

    def __iter__(self) -> Iterator[Span]:
        return iter(list(self.spans))

    def told(self) -> dict[str, int]:
        """For people."""
        return {"spans": len(self.spans), "bytes": self.bytes, "capacity": self.capacity}

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """The span that has the key, and which of its keys it is."""
        return self.places.get(key)

    def touch(self, spans: Sequence[Span]) -> None:
        """Somebody wanted them, in one go."""
        now = time()
        for span in spans:
            span.hits, span.used = span.hits + 1, now

    def worth(self, span: Span) -> tuple[float, ...]:
        """What is deeper in a text goes before what leads there."""
        recent = (span.used, -span.begin)
        if self.by == "worth":
            return (span.hits * span.share, *recent)
        return (span.hits, *recent) if self.by == "lfu" else recent

    def room(self, size: int, worth: tuple[float, ...] | None = None) -> list[Span] | None:
        """Who must go before a span of so many bytes fits: removed. None where it never would; or, by worth, where it
        is worth less than who would have to go.
        """
        if size > self.capacity:
            return None
        gone = []
        while self.bytes + size > self.capacity:
            old, ticket = self.queue[0]
            span = self.tickets.get(ticket)
            if span and old != self.worth(span):
                heapq.heapreplace(self.queue, (self.worth(span), ticket))
                continue
            if span and worth and self.by == "worth" and old[0] > worth[0]:
                return None
            heapq.heappop(self.queue)
            if span:
                self.remove(span)
                gone.append(span)
        return gone

    def add(self, span: Span) -> None:
        """There is room for it."""
        self.places |= {key: (span, i) for i, key in enumerate(span.keys)}
        self.spans[span] = ticket = next(self.count)
        self.tickets[ticket] = span
        self.bytes += span.size
        if len(self.queue) > 2 * len(self.spans) + 64:  # most of whom are gone
            self.queue = [(self.worth(s), t) for s, t in self.spans.items()]
            heapq.heapify(self.queue)
        else:
            heapq.heappush(self.queue, (self.worth(span), ticket))

    def remove(self, span: Span) -> bool:
        """Whether it was there."""
        ticket = self.spans.pop(span, None)
        if ticket is None:
            return False
        del self.tickets[ticket]
        self.bytes -= span.size
        for key in span.keys:
            if key in self.places and self.places[key][0] is span:
                del self.places[key]
        return True
