"""A cache in memory for blocks of spans on a disk (IMPRESS, FAST'25).

With selective loading, a row's pages must not enter the prefix tree, because other texts select other tokens. Blocks
that would be read again and again are therefore kept here, as they were read.
"""

from __future__ import annotations

from struct import pack
from threading import Lock
from typing import Any

import numpy as np

from retain.kv.stores.index import SpanIndex
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.span import Span
from retain.types import Bytes, Floats

METADATA_LAYER = 2**31 - 1  # the layer number of metadata in keys


class BlockCache:
    """Blocks in memory, each in the index as a span of one key. See SpanIndex for `replacement`.

    Under `importance`, a block counts the uses of its span on the disk. A block that is less important than all others
    is not kept.
    """

    def __init__(self, capacity: int, replacement: str):
        self.span_index = SpanIndex(capacity, replacement)
        self._lock = Lock()
        self.counts = {"found": 0, "missed": 0, "evicted": 0}

    def get(self, key: bytes, hits: int, attention_share: float) -> Bytes | None:
        """Return a cached block, or None. `hits` are the uses of its span."""
        with self._lock:
            found = self.span_index.find(key)
            self.counts["found" if found else "missed"] += 1
            if not found:
                return None
            entry = found[0]
            self.span_index.touch([entry])
            if self.span_index.replacement == "importance":
                entry.hits = hits
                entry.attention_share = attention_share
            return entry.data

    def put(self, key: bytes, block: Bytes, hits: int, attention_share: float) -> None:
        """Copy a block into the cache, unless a block that would be evicted is more important."""
        entry = Span(
            keys=(key,),
            num_blocks=(1,),
            block_bytes=len(block),
            hits=hits if self.span_index.replacement == "importance" else 1,
            attention_share=attention_share,
        )
        with self._lock:
            if self.span_index.find(key):
                return
            victims = self.span_index.make_room(entry.size, self.span_index.priority(entry))
            if victims is None:
                return
            self.counts["evicted"] += len(victims)
            entry.data = block.copy()
            self.span_index.add(entry)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the cache, which stands for the RAM tier."""
        return {"tier": "ram", **self.span_index.stats(), **self.counts}


class CachedReader(SpanReader):
    """Reads a span through a block cache."""

    def __init__(self, reader: SpanReader, block_cache: BlockCache):
        super().__init__(reader.span, reader.read, reader.close)
        self.block_cache = block_cache
        self.attention_shares: Floats | None = None  # of each block [M, n], relative to the average

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Read blocks of a layer: the cached ones from memory, the rest in one read, which may span cached ones."""
        blocks = [
            self.block_cache.get(self._block_key(layer, i), self.span.hits, self._attention_share(layer, i))
            for i in range(begin, end)
        ]
        missing = [i for i, block in enumerate(blocks) if block is None]
        if missing:
            first = missing[0]
            last = missing[-1] + 1
            read = super().read_blocks(layer, begin + first, begin + last).copy()
            for i in missing:
                share = self._attention_share(layer, begin + i)
                self.block_cache.put(self._block_key(layer, begin + i), read[i - first], self.span.hits, share)
            blocks[first:last] = read
        return np.stack([block for block in blocks if block is not None])

    def read_metadata(self) -> Bytes:
        """Read the metadata, from memory if it is cached."""
        key = self._block_key(METADATA_LAYER, 0)
        metadata = self.block_cache.get(key, self.span.hits, 1.0)
        if metadata is None:
            metadata = super().read_metadata()
            self.block_cache.put(key, metadata, self.span.hits, 1.0)
        return metadata

    def _block_key(self, layer: int, block: int) -> bytes:
        return pack("<qii", self.span.content_id, layer, block)

    def _attention_share(self, layer: int, block: int) -> float:
        return 1.0 if self.attention_shares is None else float(self.attention_shares[layer, block])
