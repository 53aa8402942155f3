"""Spans: blocks of consecutive pages with keys and metadata, as stores keep them.

A block is some bytes of one layer, such as one page of every kv head. Blocks of a span have one size; where layers
differ, those with fewer bytes are padded. A span of text has one key for each block of the prefix cache, and in every
layer as many blocks for a key as that has pages. Spans of other kinds lie at the end of a text, and are used as a
whole. docs/design/stores.md describes them and their files.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from itertools import accumulate
from time import time
from typing import Any

import numpy as np

from retain.types import Bytes

IO_ALIGNMENT = 4096  # bytes; direct reads need layers that start at multiples of it
TEXT = "text"  # the kind of spans of pages without a window


@dataclass(eq=False)
class Span:
    """Blocks that are kept together, layer after layer, with metadata behind them."""

    keys: tuple[bytes, ...]
    num_blocks: tuple[int, ...]  # in each layer
    block_bytes: int
    start_page: int = 0  # blocks of the text before the span; before its end where it is of another kind than text
    kind: str = TEXT  # or the name of what a text leaves behind at a position
    resumes_from: int = 0  # the first position from which a text can go on with it; 0 for text
    salt_digest: bytes = b""  # of the salt of its text, see `text.salt_digest`; unknown in old files
    metadata_bytes: int = 0  # size of the metadata; see selective/importance.py
    is_reordered: bool = False  # each layer's tokens are in the order that the metadata gives, not in the text's
    hits: int = 1  # how often the span was used
    last_used_at: float = 0.0  # seconds since 1970
    data: Bytes | None = None  # all bytes, if the span is in memory
    attention_share: float = 1.0  # attention that it received, relative to the average
    # In a store:
    name: str = ""  # of its object
    data_offset: int = 0  # of the span's data in the object
    checksums: bytes = b""  # 64 bits for each block of each layer, then for the metadata; or none
    content_id: int = 0  # identifies the bytes for caches of blocks
    created_at: float = 0.0  # seconds since 1970, by the writer's clock
    modified_at: float = 0.0  # the same by the store's clock

    def __post_init__(self) -> None:
        self.last_used_at = self.last_used_at or time()
        sizes = [*(n * self.block_bytes for n in self.num_blocks), self.metadata_bytes]
        aligned = [-(-n // IO_ALIGNMENT) * IO_ALIGNMENT for n in sizes]
        self.offsets = [0, *accumulate(aligned)]  # of each layer, of the metadata, and the end

    @property
    def size(self) -> int:
        """Size in bytes, with padding, and in a store with its header."""
        return self.data_offset + self.offsets[-1]

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


def alloc_aligned(size: int) -> Bytes:
    """Allocate zeroed bytes at an address that is a multiple of IO_ALIGNMENT."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
