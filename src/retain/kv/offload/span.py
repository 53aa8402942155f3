"""What sleeps in tiers: spans of a text, layer by layer, and which of them go first when a tier is full.

A row is a page of every kv head of one layer, G times K and then V, as bytes. A span of text has as many rows in every
layer as it has keys: key i, the chained hash of a whole page of tokens, names row i of each. Windows of sliding layers
are a span of one key and as many rows in each layer as its window takes. What is not known here: where spans lie.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import time
from typing import Any, Protocol

import numpy as np

from retain.types import Bytes, Ints

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


@dataclass(frozen=True)
class SpanRange:
    """Some keys of a span, from `begin` to `end`: as many rows of each of its layers. Of windows: all rows."""

    store: Store
    span: Span
    begin: int
    end: int


@dataclass(frozen=True)
class ReadJob:
    """Rows of one layer of a span that are to come into pages [rows, G], from position `first` of the text on."""

    store: Store
    span: Span
    layer: int  # of the span
    start_block: int
    pages: Ints
    start_position: int
