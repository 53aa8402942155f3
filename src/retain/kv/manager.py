"""The KV cache manager: the only part of `kv` that the engine sees.

A request that runs has a row. The manager opens it, attaches a cached prefix, reserves pages, maps fresh tokens to
slots, commits a step (evicts, shrinks rings), stores prefixes, and closes the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.layerwise import OnLayerEvict
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.kv.memory.cache import KVCache
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.quantized_copies import QuantizedCopies
from retain.kv.memory.ring_snapshot import RingSnapshot
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.config import PrefixConfig
from retain.kv.prefix.null_cache import NullPrefixCache
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.stats.pool import PageStates, PoolStats, classify_pages, collect_pool_stats
from retain.kv.stats.request import RequestMemory, request_memory_stats
from retain.types import Ints


class KVCacheManager:
    """Own the rows of all running requests, over one store of pages.

    `key_transform` says how cached keys differ from the model's.
    """

    def __init__(
        self,
        planner: CapacityPlanner,
        store: PageStore,
        prefix_config: PrefixConfig | None = None,
        key_transform: KeyTransform | None = None,
    ):
        c = planner.config
        spec = planner.spec
        self.planner = planner
        self.config = c
        self.spec = spec
        self.store = store
        self.pool = store.pool
        self.kv = store.kv
        self.backend = store.backend
        self.key_transform = key_transform or KeyTransform()
        num_rows = c.max_running_requests
        num_layers = len(spec.windows)
        demoted = store.in_dtype(DEMOTED_DTYPE) if c.demoted_page_size else None
        heads = planner.group.num_kv_heads
        self.tables = BlockTables(store, num_rows, num_layers, heads, planner.max_pages_per_head, demoted)
        self.slots = KVCache(self.tables, c.max_batched_tokens)
        self.evictors: dict[int, BudgetEvictor] = {}  # of rows with a budget
        self.snapshots: dict[int, RingSnapshot] = {}  # of rows in a scoring pass
        self.prefix_cache: PrefixCache | NullPrefixCache = NullPrefixCache(store.pool.num_pages)
        if prefix_config:
            self.prefix_cache = PrefixCache(self.tables, planner, prefix_config)
        self.copies = QuantizedCopies(self.tables, self._ensure_unused)  # of rows that a drafter copies
        self.pool.evict_callback = self._free_unneeded
        self._evicted_slots: Counter[str] = Counter()  # of closed rows, by policy

    # ---- capacity ------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.config.page_size

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest text."""
        return self.config.max_model_len

    @property
    def free_pages(self) -> int:
        """Pages that a request can get now: free, or held by the prefix cache or a quantized copy only."""
        return self.pool.num_free + self.prefix_cache.num_evictable_pages + self.copies.num_pages

    @property
    def total_pages(self) -> int:
        """Pages of the empty pool."""
        return self.pool.num_pages - 1

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""
        return len(self.tables.free_rows)

    def effective_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """See CapacityPlanner.effective_policy."""
        return self.planner.effective_policy(policy)

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """See CapacityPlanner.pages_needed."""
        return self.planner.pages_needed(policy, length, num_uncomputed_tokens)

    # ---- the life of a row ---------------------------------------------------------------------------------------

    def open_row(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> int:
        """Open a row for a request with so many uncomputed tokens. It owns no pages yet."""
        row = self.slots.open_row(self.planner.windows(policy), policy.fresh_tokens(num_uncomputed_tokens))
        if policy.has_budget:
            self.evictors[row] = BudgetEvictor(cast(BudgetPolicy, policy), self.tables, row, self.key_transform)
        return row

    def attach_prefix(self, row: int, query: PrefixQuery, was_preempted: bool = False) -> tuple[int, int]:
        """See PrefixCache.attach."""
        return self.prefix_cache.attach(row, query, was_preempted)

    def fork_row(self, row: int, policy: EvictionPolicy, num_computed_tokens: int) -> int | None:
        """Open a row that continues the text of another one under its own policy.

        Full pages that neither row will write are shared, the others copied. None where there is no row or no page, or
        where the other row holds only the important tokens of its prefix.
        """
        if not self.free_rows or row in self.prefix_cache.sparse_rows:
            return None
        new = self.open_row(policy, num_computed_tokens)
        can_share = row not in self.evictors and new not in self.evictors
        if not self.slots.fork_row(row, new, num_computed_tokens, can_share):
            self.close_row(new)
            return None
        return new

    def reserve(self, row: int, end_position: int, scoring: bool = False) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few.

        `scoring`: the step computes a scoring pass, which `rollback` undoes.
        """
        evictor = self.evictors.get(row)
        if scoring and row not in self.snapshots:
            if not self.pool.ensure_free(RingSnapshot.num_pages(self.tables, row)):
                return False
            self.snapshots[row] = RingSnapshot(self.tables, row)
        if evictor and not evictor.begin_reserve():
            return False
        if not self.slots.reserve(row, end_position):
            return False
        if evictor and evictor.demoter and evictor.demotes_by(end_position):
            num_pages = evictor.head_budgets.size * self.planner.pages_after_demotion(evictor.policy, end_position)
            if not evictor.demoter.reserve(end_position, num_pages):
                return False
        if evictor and evictor.layerwise and evictor.layerwise.scratch is not None:  # in one layer at a time
            t = self.tables
            layer = evictor.layers[0]
            t.peaks[row, layer] = t.counts[row, layer] + evictor.layerwise.scratch.shape[1]
        return True

    def close_row(self, row: int) -> list[int]:
        """Free every page of the row, and the row. Returns for each layer the most slots that one head owned, [L]."""
        self.prefix_cache.cancel_load(row)
        peaks = self.tables.peak_slots_per_layer(row)
        self.copies.release(row)
        self.pool.free(self._extra_pages(row))
        if evictor := self.evictors.pop(row, None):
            self._evicted_slots[policies.name_of(evictor.policy)] += evictor.num_evicted
        self.tables.close_row(row)
        self.snapshots.pop(row, None)
        return peaks

    # ---- a step --------------------------------------------------------------------------------------------------

    def tokens_until_eviction(self, row: int, num_computed_tokens: int) -> int:
        """Return how many tokens of the row can be computed before it evicts; a step must not pass that point."""
        evictor = self.evictors.get(row)
        return evictor.next_eviction - num_computed_tokens if evictor else UNBOUNDED

    def needs_single_step(self, row: int) -> bool:
        """Return whether all tokens up to the next eviction must be computed in one step."""
        evictor = self.evictors.get(row)
        return evictor is not None and evictor.layerwise is not None

    def slot_mapping(self, rows: Ints, positions: Ints) -> Tensor:
        """Return the slots of fresh tokens of these rows at these positions, both [T].

        int32 [L, G, T], on the pool's device.
        """
        slots = self.slots.slot_mapping(rows, positions)
        holes_from = np.full(len(self.tables.allocated_upto), UNBOUNDED, np.int64)  # by row
        for row, evictor in self.evictors.items():
            tokens = np.flatnonzero(rows == row)
            if evictor.layerwise and evictor.layerwise.scratch is not None and len(tokens):
                slots[evictor.layers[:, None], :, tokens] = evictor.layerwise.slots(positions[tokens]).T
            elif evictor.holes is not None:
                holes_from[row] = evictor.holes_from
        tokens = np.flatnonzero(positions >= holes_from[rows])
        evicting = rows[tokens]
        in_layer = self.tables.window[evicting].T == NO_WINDOW
        hole_indices = positions[tokens] - holes_from[evicting]
        return self.tables.device.map_holes(slots, tokens, evicting, hole_indices, in_layer)

    def begin_layerwise(
        self, rows: Sequence[int], on_layer_evict: Mapping[int, OnLayerEvict]
    ) -> Callable[[int], None] | None:
        """Prepare the rows whose prompt is computed layer by layer, before the step that does it.

        Returns a hook that the runner calls after each layer's attention; None where it is not needed.
        """
        evictors = [e for row in rows if (e := self.evictors.get(row)) and e.layerwise]
        for evictor in evictors:
            assert evictor.layerwise
            evictor.layerwise.begin_step(on_layer_evict.get(evictor.row))

        def after_attention(layer: int) -> None:
            for evictor in evictors:
                if evictor.layerwise:
                    evictor.finish_layer(layer)

        return after_attention if evictors else None

    def evicts_at(self, row: int, num_computed_tokens: int) -> bool:
        """Return whether `commit` will evict."""
        evictor = self.evictors.get(row)
        return evictor is not None and num_computed_tokens >= evictor.next_eviction

    def commit(self, row: int, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Evict what is over the budget, after a step; without uncomputed tokens shrink rings to their windows."""
        if snapshot := self.snapshots.pop(row, None):
            snapshot.free()
        if self.evicts_at(row, num_computed_tokens):
            self.evictors[row].evict(num_computed_tokens)
        if not num_uncomputed_tokens:
            self.slots.shrink_rings(row, num_computed_tokens)

    def rollback(self, row: int, num_computed_tokens: int) -> None:
        """Drop a chunk of a scoring pass: slots from that position on are holes, and rings are as they were."""
        self.snapshots[row].restore(num_computed_tokens)

    def reject(self, slots: Tensor) -> None:
        """Turn the slots of rejected drafts into holes."""
        self.tables.reject(slots)

    def shrink_budget(self, row: int, num_computed_tokens: int) -> bool:
        """Halve the row's budget where its policy allows it. Returns whether pages were freed."""
        evictor = self.evictors.get(row)
        return evictor is not None and evictor.shrink(num_computed_tokens)

    def store_prefix(self, row: int, entry: PrefixEntry, still_running: bool = False) -> None:
        """Keep the pages of the row's text for others, unless the row evicts."""
        if row not in self.evictors:
            self.prefix_cache.store(row, entry, still_running)

    def finish_load(self, row: int) -> bool:
        """See PrefixCache.finish_load."""
        return self.prefix_cache.finish_load(row, evicts=row in self.evictors)

    # ---- statistics and the accountant ---------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every page is free, or in the tables of open rows or of the tree. Raises AssertionError."""
        rows = self.tables.open_rows
        extra = [pages for row in rows for pages in (self._extra_pages(row), self.copies.page_list(row))]
        self.pool.check(np.concatenate([self.tables.page_list(rows), *extra, self.prefix_cache.pages]))

    def num_pages(self, row: int) -> int:
        """Return the pages that the row owns now, of all layers and heads, without a quantized copy."""
        return len(self.tables.page_list([row])) + len(self._extra_pages(row))

    def classify_pages(self) -> tuple[PageStates, Ints]:
        """See stats.pool.classify_pages; between two steps."""
        rows = self.tables.open_rows
        extra = {row: np.concatenate([self._extra_pages(row), self.copies.page_list(row)]) for row in rows}
        return classify_pages(self.tables, self.prefix_cache.cached_mask, extra, self.evictors)

    def pool_stats(self) -> PoolStats:
        """Count slots and pages by what they are used for, between two steps."""
        state, _ = self.classify_pages()
        prefix = self.prefix_cache
        return collect_pool_stats(self.tables, state, prefix.hits_by_source(), prefix.tier_stats())

    def evicted_slots(self) -> dict[str, int]:
        """Return the slots that budgets evicted since the start, by policy."""
        found = self._evicted_slots.copy()
        for evictor in self.evictors.values():
            found[policies.name_of(evictor.policy)] += evictor.num_evicted
        return dict(found)

    def ring_overwrites(self, policy: EvictionPolicy, num_tokens: int) -> int:
        """Return the slots that rings overwrite in a text of so many tokens."""
        windows = self.planner.windows(policy)
        return int(np.maximum(num_tokens - windows[windows < NO_WINDOW], 0).sum()) * self.planner.group.num_kv_heads

    def request_stats(self, policy: EvictionPolicy, num_tokens: int, memory: RequestMemory) -> dict[str, Any]:
        """Return the bytes and slots that a request took; see stats.request."""
        spec = policies.to_spec(policy)
        return request_memory_stats(
            policy=spec,
            unwindowed=spec if policy.ring_window is None else "full",
            windows=self.planner.windows(policy),
            num_tokens=num_tokens,
            memory=memory,
            page_bytes=self.store.page_bytes,
            page_size=self.page_size,
            kv_heads=self.planner.group.num_kv_heads,
        )

    def _extra_pages(self, row: int) -> Ints:
        """Pages that the row holds beside its tables: scratch pages, and copies of its rings."""
        evictor = self.evictors.get(row)
        snapshot = self.snapshots.get(row)
        scratch = evictor.scratch_pages if evictor else np.zeros(0, np.int32)
        return np.concatenate([scratch, snapshot.copies]) if snapshot else scratch

    def _ensure_unused(self, n: int) -> bool:
        """Return whether n pages are free that no row uses, quantized copies included."""
        if n > self.pool.num_free + self.prefix_cache.num_evictable_pages:
            return False
        return self.pool.ensure_free(n)

    def _free_unneeded(self, num_pages: int) -> None:
        """Free pages that no request needs: cached prefixes, and quantized copies where these are too few."""
        wanted = self.pool.num_free + num_pages
        self.copies.release_until_free(wanted - self.prefix_cache.num_evictable_pages)
        if isinstance(self.prefix_cache, PrefixCache) and wanted > self.pool.num_free:
            self.prefix_cache.tree.evict(wanted - self.pool.num_free)
