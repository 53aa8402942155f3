"""Offloading: moves pages that the pool evicts, or has computed, into stores; finds them there; decides on loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from typing import Any

import numpy as np

from retain.kernels.api import KV
from retain.kv.memory.block_layout import BlockLayout
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.selective.block_cache import BlockCache, CachedReader
from retain.kv.stores.selective.repack import ProbeConfig, Repacker
from retain.kv.stores.span import TEXT, CorruptionError, Span
from retain.kv.stores.store import SpanRange, Store
from retain.kv.stores.transfer import PageTransfer, create_transfers
from retain.kv.stores.warning_log import WarningLog
from retain.threads import reset_cpu_affinity
from retain.types import Bytes, Floats, Ints

NUM_READ_THREADS = 2


LayerRun = tuple[PageTransfer, Ints]  # the pages [blocks, G] of a layer, and what copies them


class Offloader:
    """The stores below one pool, in the order in which they are searched.

    `pools` are those of the KV cache groups, then of their demoted slots. `model_fingerprint` says whose
    keys and values these are. With `probe_config` only important tokens are loaded, and spans are reordered for that;
    without it everything is. `block_cache` saves repeated reads.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        pools: Sequence[KV],
        layout: BlockLayout,
        model_fingerprint: bytes,
        probe_config: ProbeConfig | None = None,
        block_cache: BlockCache | None = None,
    ):
        self.stores = stores
        self.layout = layout
        self.model_fingerprint = model_fingerprint
        self.transfers = create_transfers(pools)
        self.transfer = self.transfers[0]  # for what orders the work of all pools
        self.kv = pools[0]  # for selective loading, where there is one group
        self.cost_model = LoadCostModel()
        self.warnings = WarningLog(logging.getLogger(__name__))
        self.num_loaded_tokens = dict.fromkeys((s.name for s in stores), 0)  # by store
        self.read_executor = ThreadPoolExecutor(NUM_READ_THREADS, "retain-read", reset_cpu_affinity)
        # Reads that a step already waits for.
        self.urgent_executor = ThreadPoolExecutor(NUM_READ_THREADS, "retain-read-now", reset_cpu_affinity)
        self.probe_config = probe_config
        self.repacker = Repacker(probe_config, self.warnings) if probe_config else None
        self.block_cache = block_cache
        # What the fingerprints in the stores mean, this one's too.
        self.formats: dict[bytes, dict[str, Any]] = {k: v for s in stores for k, v in s.formats.items()}
        self._scratch: Floats = np.empty(0, np.float32)

    # ---- finding -------------------------------------------------------------------------------------------------

    def find_spans(self, keys: Sequence[bytes]) -> list[SpanRange]:
        """Return ranges of spans for the first of these keys, up to the first key that no store has."""
        ranges: list[SpanRange] = []
        for key in keys:
            found = self.find_key(key)
            if not found:
                break
            store, span, i = found
            if ranges and ranges[-1].span is span and ranges[-1].end == i:
                ranges[-1] = SpanRange(store, span, ranges[-1].begin, i + 1)
            else:
                ranges.append(SpanRange(store, span, i, i + 1))
        return ranges

    def find_key(self, key: bytes) -> tuple[Store, Span, int] | None:
        """Return the nearest store that has a key, with its span and the key's index in that."""
        return next(((store, *found) for store in self.stores if (found := store.find(key))), None)

    def other_formats(self) -> list[tuple[bytes, int, str]]:
        """Return fingerprints of others in the stores, with their page size, and how they differ from this one."""
        own = self.formats.get(self.model_fingerprint, {})
        found = []
        for fingerprint, other in self.formats.items():
            differing = [f"{name} {x}, here {own.get(name)}" for name, x in other.items() if x != own.get(name)]
            if fingerprint != self.model_fingerprint and isinstance(size := other.get("page_size"), int) and size > 0:
                found.append((fingerprint, size, "; ".join(differing)))
        return found

    def should_load(self, ranges: Sequence[SpanRange], num_tokens: int) -> bool:
        """Whether reading these ranges takes less time than computing the tokens. Records a use of their spans."""
        bytes_by_store: dict[str, int] = {}
        for r in ranges:
            size = r.span.size * (r.end - r.begin) // len(r.span.keys)
            if self.probe_config and r.span.is_reordered:
                size = int(self.probe_config.ratio * size)
            bytes_by_store[r.store.name] = bytes_by_store.get(r.store.name, 0) + size
        for store in self.stores:
            store.touch([r.span for r in ranges if r.store is store])
        stores = [r.store for r in ranges]
        latency = max((store.latency for store in stores), default=0.0)
        return self.cost_model.should_load(bytes_by_store, num_tokens, latency, self.time_limit(stores, num_tokens))

    def time_limit(self, stores: Sequence[Store], num_tokens: int) -> float:
        """Return the seconds that a load from these stores may take beside computing so many tokens."""
        compute_seconds = self.cost_model.compute_seconds(num_tokens)
        return min((store.time_limit(compute_seconds) for store in stores), default=inf)

    # ---- offloading ----------------------------------------------------------------------------------------------

    def on_computed(self, keys: Sequence[bytes], start_page: int, blocks: Ints, salt_digest: bytes = b"") -> None:
        """Put computed blocks [K, n] into the write-through stores. `start_page` blocks of the text are before them."""
        stores = [store for store in self.stores if store.write_through]
        self._offload_pages(stores, keys, start_page, blocks, salt_digest)

    def on_evicted(self, keys: Sequence[bytes], start_page: int, blocks: Ints, salt_digest: bytes = b"") -> None:
        """Put blocks that the pool evicts into every store that lacks them. Arguments as in `on_computed`."""
        self._offload_pages(self.stores, keys, start_page, blocks, salt_digest)

    def _offload_pages(
        self, stores: Sequence[Store], keys: Sequence[bytes], start_page: int, blocks: Ints, salt_digest: bytes
    ) -> None:
        for store in stores:
            i = 0
            while blocks.size and i < len(keys):
                j = i
                while j < len(keys) and j - i < store.max_keys and not store.contains(keys[j]):
                    j += 1
                if j > i:
                    place = {"start_page": start_page + i, "salt_digest": salt_digest}
                    self._put_text(store, keys[i:j], self._layer_runs(blocks[:, i:j]), place)
                i = max(j, i + 1)

    def _layer_runs(self, blocks: Ints) -> list[LayerRun]:
        """Return the pages [p, G] of each layer of blocks [K, n]."""
        groups = zip(self.transfers, self.layout.split(blocks), strict=False)
        return [(transfer, layer.T) for transfer, pages in groups for layer in pages]

    def _put_text(
        self, store: Store, keys: Sequence[bytes], runs: Sequence[LayerRun], place: Mapping[str, Any]
    ) -> None:
        probes = self.probe_config
        size = probes.metadata_size(len(runs), len(keys)) if probes else 0
        span = describe_span(keys, runs, metadata_bytes=size, **place)
        self.put_span(store, span, runs, lambda: probes.initial_metadata([p for _, p in runs]) if probes else b"")

    def put_span(
        self, store: Store, span: Span, runs: Sequence[LayerRun], make_metadata: Callable[[], Bytes | bytes]
    ) -> None:
        """Put a span of any kind into a store: the pages of each layer, and metadata. Some stores may not take it."""
        if not store.accepts(span.size):
            return
        try:
            data = self.transfer.allocate(span.size)
        except (OSError, MemoryError) as error:
            self.warnings.warn(f"tier {store.name}: no host memory for a span, which is not kept", error)
            return
        for layer, (transfer, pages) in enumerate(runs):
            if pages.size:  # the window of one token has none at a page's begin
                own = span.view_layer(data, layer)[:, : pages[0].size * transfer.page_bytes(span.kind)]
                transfer.download(pages, own.reshape(*pages.shape, -1))
        span.view_metadata(data)[:] = np.frombuffer(make_metadata(), np.uint8)
        store.put(span, data)

    # ---- loading -------------------------------------------------------------------------------------------------

    def record_load(self, places: Sequence[SpanRange], num_tokens: int) -> int:
        """Count the tokens that a row starts with from these places. Returns their number.

        Those of spans of text count for the stores of these, or else for the store of the first checkpoint.
        """
        found = [(r, (r.end - r.begin) * self.layout.block_size) for r in places if r.span.kind == TEXT]
        found = found or [(places[0], num_tokens)]
        for r, n in found:
            self.num_loaded_tokens[r.store.name] += n
        return sum(n for _, n in found)

    def open_span(self, store: Store, span: Span, deadline: float) -> SpanReader:
        """Open a span, with reads through the block cache if there is one. Raises OSError."""
        reader = store.open(span, deadline)
        if self.block_cache and span.kind == TEXT:
            return CachedReader(reader, self.block_cache)
        return reader

    def drop_unreadable(self, store: Store, span: Span, error: Exception, num_read: int, seconds: float) -> None:
        """Remove a span from its store after an error, before which `num_read` bytes of it were read in `seconds`."""
        if isinstance(error, TimeoutError) and num_read:
            self.cost_model.record_read(store.name, num_read, seconds)
        self.warnings.warn(f"tier {store.name}: a span could not be loaded and is dropped", error)
        store.delete(span, is_corrupted=isinstance(error, CorruptionError))

    def scratch_buffer(self, num_pages: int) -> Floats:
        """Return float32 memory for the keys of one head's pages. It is reused by the next call."""
        size = num_pages * self.kv.page_size * self.kv.k_dim
        if size > len(self._scratch):
            self._scratch = np.empty(size, np.float32)
        return self._scratch

    # ---- upkeep --------------------------------------------------------------------------------------------------

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of every store, and of the block cache."""
        return [*(s.stats() for s in self.stores), *([self.block_cache.stats()] if self.block_cache else [])]

    def sync(self) -> None:
        """Wait for background work: spans being reordered, and spans being written."""
        if self.repacker:
            self.repacker.sync()
        for store in self.stores:
            store.sync()

    def close(self) -> None:
        """Finish background work and close the stores."""
        if self.repacker:
            self.repacker.close()
        self.urgent_executor.shutdown()
        self.read_executor.shutdown()
        with ExitStack() as closing:
            closing.callback(self.warnings.close)
            for store in self.stores:
                closing.callback(store.close)


def describe_span(keys: Sequence[bytes], runs: Sequence[LayerRun], kind: str = TEXT, **place: Any) -> Span:
    """Return a span for the pages of each layer. `place` has its further fields."""
    num_blocks = tuple(len(pages) for _, pages in runs)
    block_bytes = max((pages.shape[1] * transfer.page_bytes(kind) for transfer, pages in runs), default=0)
    return Span(tuple(keys), num_blocks, block_bytes, kind=kind, **place)
