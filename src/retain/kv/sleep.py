"""Pages that sleep: who goes to sleep in which tier, who is found there, and when it is worth waking.

What is not known here: rows, texts, how tiers keep what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retain.kernels import KV
from retain.kv.hot import Hot, Through
from retain.kv.lane import lane
from retain.kv.ledger import Filed
from retain.kv.node import Rings
from retain.kv.packing import Packs, Probes
from retain.kv.span import Bytes, Span, unbound
from retain.kv.tiers import Reader, Store

if TYPE_CHECKING:
    from retain.kv.fetch import Job

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Part:
    """Some keys of a span, from `begin` to `end`: as many rows of each of its layers. Of windows: all rows."""

    store: Store
    span: Span
    begin: int
    end: int


class Rates:
    """What was measured: tokens computed a second, and bytes read, by store."""

    def __init__(self) -> None:
        self.compute: float | None = None
        self.read: dict[str, float] = {}

    def computed(self, tokens: int, seconds: float) -> None:
        """Half of what we believe is the newest."""
        rate = tokens / seconds
        self.compute = rate if self.compute is None else (self.compute + rate) / 2

    def came(self, store: str, size: int, seconds: float) -> None:
        """The same for a store."""
        rate = size / seconds
        self.read[store] = (self.read.get(store, rate) + rate) / 2

    def worth_it(self, sizes: dict[str, int], tokens: int) -> bool:
        """Whether to read so many bytes is sooner done than to compute so many tokens; so, where it is not known.

        A store that was refused is believed to be a little faster the next time: what was slow once may not be now.
        """
        known = {s: n / self.read[s] for s, n in sizes.items() if s in self.read}
        sooner = self.compute is None or sum(known.values()) < tokens / self.compute
        if not sooner:
            self.read |= {s: 1.02 * self.read[s] for s in known}
        return sooner


class Sleep:
    """The stores of one pool, in the order in which they are asked. `brand`: whose keys and values these are.

    `probes`: only what is important wakes, and spans are packed for it; None: everything does. `hot`: rows that
    are not read again.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        kv: KV,
        kv_heads: int,
        brand: bytes,
        probes: Probes | None = None,
        hot: Hot | None = None,
    ):
        self.stores, self.kv, self.kv_heads, self.brand = stores, kv, kv_heads, brand
        self.lane = lane(kv)
        self.row_bytes = kv_heads * 2 * kv.page_size * kv.head_dim * kv.dtype.itemsize
        self.rates = Rates()
        self.woken = dict.fromkeys((s.name for s in stores), 0)  # tokens, by store
        self.readers = ThreadPoolExecutor(2, "retain-read", unbound)
        self.urgent = ThreadPoolExecutor(2, "retain-read-now", unbound)  # for what somebody waits for already
        self.probes, self.packs = probes, Packs(probes, kv) if probes else None
        self.memory, self.hot = np.empty(0, np.float32), hot

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Part]:
        """Who has the first of these keys, as far as all are there."""
        parts: list[Part] = []
        for key in keys:
            found = self._find(key)
            if not found:
                break
            store, span, i = found
            if parts and parts[-1].span is span and parts[-1].end == i:
                parts[-1] = Part(store, span, parts[-1].begin, i + 1)
            else:
                parts.append(Part(store, span, i, i + 1))
        return parts

    def windows(self, key: bytes) -> Part | None:
        """The windows of sliding layers before the end of this page."""
        found = self._find(_windows(key))
        return Part(*found, 1) if found else None

    def _find(self, key: bytes) -> tuple[Store, Span, int] | None:
        return next(((s, *there) for s in self.stores if (there := s.find(key))), None)

    def worth_it(self, parts: Sequence[Part], tokens: int) -> bool:
        """Whether they are sooner read than so many tokens computed. Who has them is told that somebody asked."""
        sizes: dict[str, int] = {}
        for p in parts:
            whole = p.span.size if p.span.firsts else p.span.size * (p.end - p.begin) // len(p.span.keys)
            if self.probes and p.span.packed:
                whole = int(self.probes.ratio * whole)
            sizes[p.store.name] = sizes.get(p.store.name, 0) + whole
        for store in self.stores:
            store.touch([p.span for p in parts if p.store is store])
        return self.rates.worth_it(sizes, tokens)

    # ---- going to sleep ------------------------------------------------------------------------------------------

    def born(self, keys: Sequence[bytes], begin: int, pages: Ints, rings: Rings | None) -> None:
        """Pages [M, G, n] of these keys were computed, from page `begin` of their text on; and windows at their end."""
        self._keep([s for s in self.stores if s.replica], keys, begin, pages, rings)

    def evicted(self, keys: Sequence[bytes], begin: int, pages: Ints, rings: Rings | None) -> None:
        """The pool gives them up."""
        self._keep(self.stores, keys, begin, pages, rings)

    def _keep(
        self, stores: Sequence[Store], keys: Sequence[bytes], begin: int, pages: Ints, rings: Rings | None
    ) -> None:
        rows = pages.transpose(0, 2, 1)  # [M, n, G]
        for store in stores:
            i = 0
            while rows.size and i < len(keys):
                j = i
                while j < len(keys) and j - i < store.most and not store.has(keys[j]):
                    j += 1
                if j > i:
                    self._put(store, tuple(keys[i:j]), begin + i, list(rows[:, i:j]))
                i = max(j, i + 1)
            if rings and not store.has(_windows(keys[-1])):
                windows = [p.T for p in rings.pages]  # [n, G]
                self._put(store, (_windows(keys[-1]),), begin + len(keys), windows, rings.first, rings.least)

    def _put(
        self,
        store: Store,
        keys: tuple[bytes, ...],
        begin: int,
        rows: list[Ints],
        firsts: Sequence[int] = (),
        least: int = 0,
    ) -> None:
        notes = self.probes.size(len(rows), len(keys), self.kv) if self.probes and not firsts else 0
        span = Span(keys, tuple(map(len, rows)), self.row_bytes, begin, tuple(firsts), least, notes)
        if not store.wants(span.size):
            return
        try:
            data = self.lane.blocks(span.size)
        except (OSError, MemoryError):
            return  # no memory: it is not kept
        for layer, pages in enumerate(rows):
            self.lane.take(pages, span.of(data, layer).reshape(*pages.shape, 2, -1))
        if self.probes and notes:
            data[span.begins[-2] : span.begins[-2] + notes] = self.probes.born(self.kv, rows).bytes
        store.keep(span, data)

    # ---- waking --------------------------------------------------------------------------------------------------

    def wake(self, parts: Sequence[Part], windows: Part | None) -> None:
        """Somebody begins with them."""
        for p in parts or ([windows] if windows else []):
            self.woken[p.store.name] += (p.end - p.begin) * self.kv.page_size

    def put(self, job: Job, rows: Bytes) -> None:
        """Rows [n, row_bytes] come into their pages."""
        self.lane.put(job.pages, rows.reshape(*job.pages.shape, 2, -1))

    def fill(self, jobs: Sequence[Job]) -> None:
        """Pages that have come hold the positions of their text."""
        S = self.kv.page_size
        pages = np.concatenate([job.pages for job in jobs])  # [n, G]
        firsts = np.concatenate([job.first + S * np.arange(len(job.pages), dtype=np.int32) for job in jobs])
        self.lane.place(pages, (firsts[:, None] + np.arange(S, dtype=np.int32))[:, None])

    def open(self, store: Store, span: Span) -> Reader:
        """A span, to be read through what is hot. Raises OSError."""
        reader = store.open(span)
        return Through(reader, self.hot, span, span.number) if self.hot and isinstance(span, Filed) else reader

    def scratch(self, pages: int) -> NDArray[np.float32]:
        """Memory for the keys of so many pages, the same each time."""
        size = pages * self.kv.page_size * self.kv.head_dim
        if size > len(self.memory):
            self.memory = np.empty(size, np.float32)
        return self.memory

    def told(self) -> list[dict[str, Any]]:
        """What every store tells."""
        return [*(s.told() for s in self.stores), *([self.hot.told()] if self.hot else [])]

    def sync(self) -> None:
        """Wait for what goes on in the background: what was looked at is packed, what was kept is written."""
        if self.packs:
            self.packs.sync()
        for store in self.stores:
            store.sync()

    def close(self) -> None:
        """Finish what was begun."""
        if self.packs:
            self.packs.close()
        self.urgent.shutdown()
        self.readers.shutdown()
        with ExitStack() as all_of_them:
            for store in self.stores:
                all_of_them.callback(store.close)


def _windows(key: bytes) -> bytes:
    return blake2b(key + b"windows", digest_size=16).digest()
