"""Spans: blocks of consecutive pages with keys and metadata, as stores keep them; the interfaces of stores and readers.

A block is some bytes of one layer, such as one page of every kv head. Blocks of a span have one size; where layers
differ, those with fewer bytes are padded. A span of text has one key for each block of the prefix cache, and in every
layer as many blocks for a key as that has pages. Spans of other kinds lie at the end of a text, and are used as a
whole. docs/design/stores.md describes them and their files.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from time import time
from typing import Any, Protocol

import numpy as np

from retain.types import Bytes, Ints

IO_ALIGNMENT = 4096  # bytes; direct reads need layers that start at multiples of it


@dataclass(eq=False)
class Span:
    """Blocks that are kept together, layer after layer, with metadata behind them."""

    keys: tuple[bytes, ...]
    num_blocks: tuple[int, ...]  # in each layer
    block_bytes: int
    start_page: int = 0  # blocks of the text before the span; before its end where it is of another kind than text
    kind: str = "text"  # or the name of what a text leaves behind at a position
    resumes_from: int = 0  # the first position from which a text can go on with it; 0 for text
    metadata_bytes: int = 0  # size of the metadata; see selective/importance.py
    is_reordered: bool = False  # each layer's tokens are in the order that the metadata gives, not in the text's
    hits: int = 1  # how often the span was used
    last_used_at: float = 0.0  # seconds since 1970
    data: Bytes | None = None  # all bytes, if the span is in memory
    attention_share: float = 1.0  # attention that it received, relative to the average
    content_id: int | None = None  # identifies the bytes for caches of blocks; None: they are in memory already

    def __post_init__(self) -> None:
        self.last_used_at = self.last_used_at or time()
        sizes = [*(n * self.block_bytes for n in self.num_blocks), self.metadata_bytes]
        aligned = [-(-n // IO_ALIGNMENT) * IO_ALIGNMENT for n in sizes]
        self.offsets = [0, *accumulate(aligned)]  # of each layer, of the metadata, and the end

    @property
    def size(self) -> int:
        """Size in bytes, padding included."""
        return self.offsets[-1]

    def view_layer(self, data: Bytes, layer: int) -> Bytes:
        """Return a view of the blocks of a layer, [blocks, block_bytes], in the span's bytes."""
        begin = self.offsets[layer]
        n = self.num_blocks[layer]
        return data[begin : begin + n * self.block_bytes].reshape(n, self.block_bytes)

    def view_metadata(self, data: Bytes) -> Bytes:
        """Return a view of the metadata in the span's bytes."""
        begin = self.offsets[-2]
        return data[begin : begin + self.metadata_bytes]


@dataclass(frozen=True)
class SpanFormat:
    """Whose keys and values spans hold. Keys of spans are chained from the fingerprint."""

    fingerprint: bytes = bytes(16)  # of the model, the precision and whatever else changes K or V
    description: dict[str, Any] = field(default_factory=dict)  # the same for people
    page_bytes: int = 0  # of a page of a text, in all layers without a window


UNKNOWN_FORMAT = SpanFormat()


class CorruptionError(OSError):
    """The bytes that were read are not the bytes that were written."""


class SpanReader(Protocol):
    """An open span. Methods raise OSError if it cannot be read, and CorruptionError if its bytes have changed."""

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Read blocks of a layer, [end - begin, block_bytes]. They are valid until this thread reads again."""

    def read_metadata(self) -> Bytes:
        """Read the metadata. It is valid until this thread reads again."""

    def close(self) -> None:
        """Release the span."""


class Store(Protocol):
    """A set of spans. Methods may be called while other threads read; only `open` raises."""

    name: str  # of its tier
    max_keys: int  # most keys of a span
    write_through: bool  # True: it takes pages when they are computed. False: when the pool evicts them
    is_shared: bool  # whether other engines use its spans, too
    distance: int  # the nearest stores are searched first
    formats: dict[bytes, dict[str, Any]]  # descriptions of the fingerprints whose spans it may have

    @property
    def latency(self) -> float:
        """Seconds until the first byte of a read, about."""

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans."""

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return the seconds that a load may take of tokens that take `compute_seconds` to compute (None: unknown)."""

    def contains(self, key: bytes) -> bool:
        """Whether a span has the key, or a span that is being written will have it."""

    def accepts(self, size: int) -> bool:
        """Whether the store would take a span of this many bytes now."""

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:
        """Keep a span, now or in the background. The store owns `data` [span.size] from here on.

        It takes the place of `replaces`, a span with the same keys. Open readers of that one go on.
        """

    def open(self, span: Span, deadline: float = inf) -> SpanReader:
        """Open a span for reading; it stays readable if the store evicts it. Raises OSError.

        Readers of stores with a time limit raise TimeoutError after `deadline`, a time of `monotonic`.
        """

    def delete(self, span: Span, is_corrupted: bool = False) -> None:
        """Remove a span."""

    def stats(self) -> dict[str, Any]:
        """Return spans, bytes and capacity, and the counts of events since the store was opened."""

    def sync(self) -> None:
        """Wait until all spans that were put are written."""

    def close(self) -> None:
        """Finish pending work and release the store."""


@dataclass(frozen=True)
class SpanRange:
    """Keys `begin` to `end` of a span and their blocks, or the whole of a span of another kind than text."""

    store: Store
    span: Span
    begin: int
    end: int


@dataclass(frozen=True)
class ReadJob:
    """Blocks of one layer of a span, to be read into pages [blocks, G] for the text from `start_position` on."""

    store: Store
    span: Span
    layer: int  # of the span
    start_block: int
    pages: Ints
    start_position: int
    group: int = 0  # the KV cache group of the layer


def alloc_aligned(size: int) -> Bytes:
    """Allocate zeroed bytes at an address that is a multiple of IO_ALIGNMENT."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
