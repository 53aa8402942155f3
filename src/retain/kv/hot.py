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

from retain.kv.span import Bytes, Shelf, Span
from retain.kv.tiers import Reader

NOTES = 2**31 - 1  # as a layer


class Hot:
    """Rows in memory. `by`: who goes first where there is no room: `lru`, `lfu`, or `worth`: the lowest product of how
    often its span was wanted and its share of what was looked at; what is worth less than all others does not come.
    """

    def __init__(self, capacity: int, by: str):
        self.shelf, self.guard = Shelf(capacity, by), Lock()
        self.counts = {"found": 0, "missed": 0, "evicted": 0}

    def find(self, key: bytes, hits: int, share: float) -> Bytes | None:
        """A row that is here. `hits`: how often its span was wanted."""
        with self.guard:
            there = self.shelf.find(key)
            self.counts["found" if there else "missed"] += 1
            if not there:
                return None
            span = there[0]
            self.shelf.touch([span])
            if self.shelf.by == "worth":
                span.hits, span.share = hits, share
            return span.data

    def keep(self, key: bytes, row: Bytes, hits: int, share: float) -> None:
        """One more row, if it is worth it."""
        span = Span((key,), (1,), len(row), hits=hits if self.shelf.by == "worth" else 1, share=share)
        with self.guard:
            if self.shelf.find(key) or (gone := self.shelf.room(span.size, self.shelf.worth(span))) is None:
                return
            self.counts["evicted"] += len(gone)
            span.data = row.copy()
            self.shelf.add(span)

    def told(self) -> dict[str, Any]:
        """For people."""
        return {"tier": "ram", **self.shelf.told(), **self.counts}


class Through:
    """See `tiers.Reader`: what is hot does not have to be read. `number` names the span as it lies on the disk now."""

    def __init__(self, reader: Reader, hot: Hot, span: Span, number: int):
        self.reader, self.hot, self.span, self.number = reader, hot, span, number
        self.shares: NDArray[np.float32] | None = None  # [M, n] of what was looked at, beside the average

    def rows(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        found = [self.hot.find(self._key(layer, i), self.span.hits, self._share(layer, i)) for i in range(begin, end)]
        if all(row is not None for row in found):
            return np.stack([row for row in found if row is not None])
        missing = [i for i, row in enumerate(found) if row is None]
        first, last = missing[0], missing[-1] + 1  # in one go: what is between comes along
        read = self.reader.rows(layer, begin + first, begin + last).copy()
        for i in missing:
            self.hot.keep(self._key(layer, begin + i), read[i - first], self.span.hits, self._share(layer, begin + i))
        whole = [row for row in (*found[:first], *read, *found[last:]) if row is not None]
        return np.stack(whole)

    def notes(self) -> Bytes:  # noqa: D102
        key = self._key(NOTES, 0)
        found = self.hot.find(key, self.span.hits, 1.0)
        if found is None:
            found = self.reader.notes()
            self.hot.keep(key, found, self.span.hits, 1.0)
        return found

    def close(self) -> None:  # noqa: D102
        self.reader.close()

    def _key(self, layer: int, row: int) -> bytes:
        return pack("<qii", self.number, layer, row)

    def _share(self, layer: int, row: int) -> float:
        return 1.0 if self.shares is None else float(self.shares[layer, row])
