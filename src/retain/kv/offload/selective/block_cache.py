"""Rows of spans on a disk that are kept in memory too: wanted often, and looked at much (IMPRESS, FAST'25).

Where only what is important is loaded, no page of it may go into the pool's tree, for other texts want other tokens; so
what would be read again and again is kept here as it was read. What is not known here: what rows are for.
"""

from __future__ import annotations

from struct import pack
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retain.kv.offload.index import SpanIndex
from retain.kv.offload.span import Span, SpanReader
from retain.types import Bytes

METADATA_LAYER = 2**31 - 1  # as a layer


class BlockCache:
    """Rows in memory. `by`: who goes first where there is no room: `lru`, `lfu`, or `worth`: the lowest product of how
    often its span was wanted and its share of what was looked at; what is worth less than all others does not come.
    """

    def __init__(self, capacity: int, replacement: str):
        self.span_index, self._lock = SpanIndex(capacity, replacement), Lock()
        self.counts = {"found": 0, "missed": 0, "evicted": 0}

    def get(self, key: bytes, hits: int, attention_share: float) -> Bytes | None:
        """A row that is here. `hits`: how often its span was wanted."""
        with self._lock:
            there = self.span_index.find(key)
            self.counts["found" if there else "missed"] += 1
            if not there:
                return None
            span = there[0]
            self.span_index.touch([span])
            if self.span_index.replacement == "worth":
                span.hits, span.attention_share = hits, attention_share
            return span.data

    def put(self, key: bytes, block: Bytes, hits: int, attention_share: float) -> None:
        """One more row, if it is worth it."""
        span = Span(
            (key,),
            (1,),
            len(block),
            hits=hits if self.span_index.replacement == "worth" else 1,
            attention_share=attention_share,
        )
        with self._lock:
            if (
                self.span_index.find(key)
                or (gone := self.span_index.make_room(span.size, self.span_index.priority(span))) is None
            ):
                return
            self.counts["evicted"] += len(gone)
            span.data = block.copy()
            self.span_index.add(span)

    def stats(self) -> dict[str, Any]:
        """For people."""
        return {"tier": "ram", **self.span_index.stats(), **self.counts}


class CachedReader:
    """See `tiers.Reader`: what is hot does not have to be read. `number` names the span as it lies on the disk now."""

    def __init__(self, reader: SpanReader, block_cache: BlockCache, span: Span, file_number: int):
        self.reader, self.block_cache, self.span, self.file_number = reader, block_cache, span, file_number
        self.attention_shares: NDArray[np.float32] | None = None  # [M, n] of what was looked at, beside the average

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        found = [
            self.block_cache.get(self._block_key(layer, i), self.span.hits, self._attention_share(layer, i))
            for i in range(begin, end)
        ]
        if all(row is not None for row in found):
            return np.stack([row for row in found if row is not None])
        missing = [i for i, row in enumerate(found) if row is None]
        first, last = missing[0], missing[-1] + 1  # in one go: what is between comes along
        read = self.reader.read_blocks(layer, begin + first, begin + last).copy()
        for i in missing:
            self.block_cache.put(
                self._block_key(layer, begin + i),
                read[i - first],
                self.span.hits,
                self._attention_share(layer, begin + i),
            )
        whole = [row for row in (*found[:first], *read, *found[last:]) if row is not None]
        return np.stack(whole)

    def read_metadata(self) -> Bytes:  # noqa: D102
        key = self._block_key(METADATA_LAYER, 0)
        found = self.block_cache.get(key, self.span.hits, 1.0)
        if found is None:
            found = self.reader.read_metadata()
            self.block_cache.put(key, found, self.span.hits, 1.0)
        return found

    def close(self) -> None:  # noqa: D102
        self.reader.close()

    def _block_key(self, layer: int, block: int) -> bytes:
        return pack("<qii", self.file_number, layer, block)

    def _attention_share(self, layer: int, block: int) -> float:
        return 1.0 if self.attention_shares is None else float(self.attention_shares[layer, block])
