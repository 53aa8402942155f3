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

from retain.kernels.api import KV
from retain.kv.offload.selective.repack import ProbeConfig, Repacker
from retain.kv.offload.selective.row_cache import BlockCache, CachedReader
from retain.kv.offload.span import Bytes, Span, reset_cpu_affinity
from retain.kv.offload.sqlite_index import StoredSpan
from retain.kv.offload.tiers import SpanReader, Store
from retain.kv.offload.transfer import create_transfer
from retain.kv.memory.sliding_windows import SlidingWindows

if TYPE_CHECKING:
    from retain.kv.offload.loader import ReadJob

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class SpanRange:
    """Some keys of a span, from `begin` to `end`: as many rows of each of its layers. Of windows: all rows."""

    store: Store
    span: Span
    begin: int
    end: int


class LoadCostModel:
    """What was measured: tokens computed a second, and bytes read, by store."""

    def __init__(self) -> None:
        self.compute_rate: float | None = None
        self.read_rates: dict[str, float] = {}

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Half of what we believe is the newest."""
        rate = num_tokens / seconds
        self.compute_rate = rate if self.compute_rate is None else (self.compute_rate + rate) / 2

    def record_read(self, store: str, num_bytes: int, seconds: float) -> None:
        """The same for a store."""
        rate = num_bytes / seconds
        self.read_rates[store] = (self.read_rates.get(store, rate) + rate) / 2

    def should_load(self, bytes_by_store: dict[str, int], num_tokens: int) -> bool:
        """Whether to read so many bytes is sooner done than to compute so many tokens; so, where it is not known.

        A store that was refused is believed to be a little faster the next time: what was slow once may not be now.
        """
        known = {s: n / self.read_rates[s] for s, n in bytes_by_store.items() if s in self.read_rates}
        sooner = self.compute_rate is None or sum(known.values()) < num_tokens / self.compute_rate
        if not sooner:
            self.read_rates |= {s: 1.02 * self.read_rates[s] for s in known}
        return sooner


class Offloader:
    """The stores of one pool, in the order in which they are asked. `brand`: whose keys and values these are.

    `probes`: only what is important wakes, and spans are packed for it; None: everything does. `hot`: rows that
    are not read again.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        kv: KV,
        kv_heads: int,
        model_fingerprint: bytes,
        probe_config: ProbeConfig | None = None,
        block_cache: BlockCache | None = None,
    ):
        self.stores, self.kv, self.kv_heads, self.model_fingerprint = stores, kv, kv_heads, model_fingerprint
        self.transfer = create_transfer(kv)
        self.block_bytes = kv_heads * 2 * kv.page_size * kv.head_dim * kv.dtype.itemsize
        self.cost_model = LoadCostModel()
        self.num_loaded_tokens = dict.fromkeys((s.name for s in stores), 0)  # tokens, by store
        self.read_executor = ThreadPoolExecutor(2, "retain-read", reset_cpu_affinity)
        self.urgent_executor = ThreadPoolExecutor(
            2, "retain-read-now", reset_cpu_affinity
        )  # for what somebody waits for already
        self.probe_config, self.repacker = probe_config, Repacker(probe_config, kv) if probe_config else None
        self._scratch, self.block_cache = np.empty(0, np.float32), block_cache

    # ---- finding -------------------------------------------------------------------------------------------------

    def find_spans(self, keys: Sequence[bytes]) -> list[SpanRange]:
        """Who has the first of these keys, as far as all are there."""
        parts: list[SpanRange] = []
        for key in keys:
            found = self._find_key(key)
            if not found:
                break
            store, span, i = found
            if parts and parts[-1].span is span and parts[-1].end == i:
                parts[-1] = SpanRange(store, span, parts[-1].begin, i + 1)
            else:
                parts.append(SpanRange(store, span, i, i + 1))
        return parts

    def find_windows(self, key: bytes) -> SpanRange | None:
        """The windows of sliding layers before the end of this page."""
        found = self._find_key(_window_key(key))
        return SpanRange(*found, 1) if found else None

    def _find_key(self, key: bytes) -> tuple[Store, Span, int] | None:
        return next(((s, *there) for s in self.stores if (there := s.find(key))), None)

    def should_load(self, ranges: Sequence[SpanRange], num_tokens: int) -> bool:
        """Whether they are sooner read than so many tokens computed. Who has them is told that somebody asked."""
        sizes: dict[str, int] = {}
        for p in ranges:
            whole = p.span.size if p.span.window_starts else p.span.size * (p.end - p.begin) // len(p.span.keys)
            if self.probe_config and p.span.is_reordered:
                whole = int(self.probe_config.ratio * whole)
            sizes[p.store.name] = sizes.get(p.store.name, 0) + whole
        for store in self.stores:
            store.touch([p.span for p in ranges if p.store is store])
        return self.cost_model.should_load(sizes, num_tokens)

    # ---- going to sleep ------------------------------------------------------------------------------------------

    def on_computed(
        self, keys: Sequence[bytes], start_page: int, pages: Ints, sliding_windows: SlidingWindows | None
    ) -> None:
        """Pages [M, G, n] of these keys were computed, from page `begin` of their text on; and windows at their end."""
        self._offload_pages([s for s in self.stores if s.write_through], keys, start_page, pages, sliding_windows)

    def on_evicted(
        self, keys: Sequence[bytes], start_page: int, pages: Ints, sliding_windows: SlidingWindows | None
    ) -> None:
        """The pool gives them up."""
        self._offload_pages(self.stores, keys, start_page, pages, sliding_windows)

    def _offload_pages(
        self,
        stores: Sequence[Store],
        keys: Sequence[bytes],
        start_page: int,
        pages: Ints,
        sliding_windows: SlidingWindows | None,
    ) -> None:
        rows = pages.transpose(0, 2, 1)  # [M, n, G]
        for store in stores:
            i = 0
            while rows.size and i < len(keys):
                j = i
                while j < len(keys) and j - i < store.max_keys and not store.contains(keys[j]):
                    j += 1
                if j > i:
                    self._store_span(store, tuple(keys[i:j]), start_page + i, list(rows[:, i:j]))
                i = max(j, i + 1)
            if sliding_windows and not store.contains(_window_key(keys[-1])):
                windows = [p.T for p in sliding_windows.pages]  # [n, G]
                self._store_span(
                    store,
                    (_window_key(keys[-1]),),
                    start_page + len(keys),
                    windows,
                    sliding_windows.first_pages,
                    sliding_windows.min_resume_position,
                )

    def _store_span(
        self,
        store: Store,
        keys: tuple[bytes, ...],
        start_page: int,
        layer_pages: list[Ints],
        window_starts: Sequence[int] = (),
        min_resume_position: int = 0,
    ) -> None:
        notes = (
            self.probe_config.metadata_size(len(layer_pages), len(keys), self.kv)
            if self.probe_config and not window_starts
            else 0
        )
        span = Span(
            keys,
            tuple(map(len, layer_pages)),
            self.block_bytes,
            start_page,
            tuple(window_starts),
            min_resume_position,
            notes,
        )
        if not store.accepts(span.size):
            return
        try:
            data = self.transfer.allocate(span.size)
        except (OSError, MemoryError):
            return  # no memory: it is not kept
        for layer, pages in enumerate(layer_pages):
            self.transfer.download(pages, span.view_layer(data, layer).reshape(*pages.shape, 2, -1))
        if self.probe_config and notes:
            data[span.offsets[-2] : span.offsets[-2] + notes] = self.probe_config.initial_metadata(
                self.kv, layer_pages
            ).serialized
        store.put(span, data)

    # ---- waking --------------------------------------------------------------------------------------------------

    def record_load(self, ranges: Sequence[SpanRange], windows: SpanRange | None) -> None:
        """Somebody begins with them."""
        for p in ranges or ([windows] if windows else []):
            self.num_loaded_tokens[p.store.name] += (p.end - p.begin) * self.kv.page_size

    def write_pages(self, job: ReadJob, blocks: Bytes) -> None:
        """Rows [n, row_bytes] come into their pages."""
        self.transfer.upload(job.pages, blocks.reshape(*job.pages.shape, 2, -1))

    def write_positions(self, jobs: Sequence[ReadJob]) -> None:
        """Pages that have come hold the positions of their text."""
        S = self.kv.page_size
        pages = np.concatenate([job.pages for job in jobs])  # [n, G]
        firsts = np.concatenate([job.start_position + S * np.arange(len(job.pages), dtype=np.int32) for job in jobs])
        self.transfer.set_positions(pages, (firsts[:, None] + np.arange(S, dtype=np.int32))[:, None])

    def open_span(self, store: Store, span: Span) -> SpanReader:
        """A span, to be read through what is hot. Raises OSError."""
        reader = store.open(span)
        return (
            CachedReader(reader, self.block_cache, span, span.file_number)
            if self.block_cache and isinstance(span, StoredSpan)
            else reader
        )

    def scratch_buffer(self, num_pages: int) -> NDArray[np.float32]:
        """Memory for the keys of so many pages, the same each time."""
        size = num_pages * self.kv.page_size * self.kv.head_dim
        if size > len(self._scratch):
            self._scratch = np.empty(size, np.float32)
        return self._scratch

    def stats(self) -> list[dict[str, Any]]:
        """What every store tells."""
        return [*(s.stats() for s in self.stores), *([self.block_cache.stats()] if self.block_cache else [])]

    def sync(self) -> None:
        """Wait for what goes on in the background: what was looked at is packed, what was kept is written."""
        if self.repacker:
            self.repacker.sync()
        for store in self.stores:
            store.sync()

    def close(self) -> None:
        """Finish what was begun."""
        if self.repacker:
            self.repacker.close()
        self.urgent_executor.shutdown()
        self.read_executor.shutdown()
        with ExitStack() as all_of_them:
            for store in self.stores:
                all_of_them.callback(store.close)


def _window_key(key: bytes) -> bytes:
    return blake2b(key + b"windows", digest_size=16).digest()
