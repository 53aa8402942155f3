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
IO_ALIGNMENT = 4096  # layers begin at multiples of it, as direct reads want it


@dataclass(eq=False)
class Span:
    """Rows that sleep together; in bytes the layers lie one behind the other."""

    keys: tuple[bytes, ...]
    num_blocks: tuple[int, ...]  # of each layer
    block_bytes: int
    start_page: int = 0  # pages of its text before it
    window_starts: tuple[int, ...] = ()  # windows: the page of the text with which each layer begins
    min_resume_position: int = 0  # windows: the first position from which texts can go on
    metadata_bytes: int = 0  # bytes, behind the layers: see kv/importance.py
    is_reordered: bool = False  # tokens of a layer lie in the order that the notes say, not in that of the text
    hits: int = 1  # how often somebody wanted it
    last_used_at: float = 0.0  # when, the last time (seconds since 1970)
    data: Bytes | None = None  # all of it, where it is in memory
    attention_share: float = 1.0  # of what was looked at, beside others

    def __post_init__(self) -> None:
        self.last_used_at = self.last_used_at or time()
        sizes = [*(n * self.block_bytes for n in self.num_blocks), self.metadata_bytes]
        self.offsets = [
            0,
            *accumulate(-(-n // IO_ALIGNMENT) * IO_ALIGNMENT for n in sizes),
        ]  # of layers, of the notes, and the end

    @property
    def size(self) -> int:
        """Bytes, with what fills up blocks."""
        return self.offsets[-1]

    def view_layer(self, data: Bytes, layer: int) -> Bytes:
        """The rows of a layer in all its bytes: a view, [rows, row_bytes]."""
        begin, n = self.offsets[layer], self.num_blocks[layer]
        return data[begin : begin + n * self.block_bytes].reshape(n, self.block_bytes)


@dataclass(frozen=True)
class MemoryReader:
    """A span in memory, to be read. See `tiers.Reader`."""

    span: Span
    data: Bytes
    on_read: Callable[[int], None] | None = None  # how many bytes were read

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        if self.on_read:
            self.on_read((end - begin) * self.span.block_bytes)
        return self.span.view_layer(self.data, layer)[begin:end]

    def read_metadata(self) -> Bytes:  # noqa: D102
        at = self.span.offsets[-2]
        return self.data[at : at + self.span.metadata_bytes]

    def close(self) -> None:  # noqa: D102
        pass


def alloc_aligned(size: int) -> Bytes:
    """So many bytes of zeros, at a multiple of BLOCK in memory."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def reset_cpu_affinity() -> None:
    """This thread may run on any core: it would inherit the one that OpenMP has bound its parent to."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


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
        """Who must go before a span of so many bytes fits: removed. None where it never would; or, by worth, where it
        is worth less than who would have to go.
        """
        if size > self.capacity:
            return None
        gone = []
        while self.used_bytes + size > self.capacity:
            old, ticket = self.heap[0]
            span = self.by_id.get(ticket)
            if span and old != self.priority(span):
                heapq.heapreplace(self.heap, (self.priority(span), ticket))
                continue
            if span and priority and self.replacement == "worth" and old[0] > priority[0]:
                return None
            heapq.heappop(self.heap)
            if span:
                self.remove(span)
                gone.append(span)
        return gone

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
