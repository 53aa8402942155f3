"""The cache of a simulated replica: the engine's own pool and radix tree, with tables of pages but no K and V.

It does for models without sliding layers, and the policy `full`, what `KVCacheManager` does for the `Scheduler`. One
page stands for the pages of all layers and heads, which come and go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.memory.block_tables import UNBOUNDED
from retain.kv.memory.pool import PagePool
from retain.kv.offload.cost_model import LoadCostModel
from retain.kv.prefix.node import Node, PrefixMatch
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.prefix.radix_tree import RadixTree
from retain.types import Ints
from tools.simulation.calibration import Calibration
from tools.simulation.tiers import KeyListener, SimulatedTier

ROOT_HASH = b""  # of all texts: one model, one tenant


class SimulatedCostModel(LoadCostModel):
    """The engine's rule of loading; it logs no warning, for nobody can repair a simulated store."""

    def __init__(self, tiers: Sequence[SimulatedTier]):
        super().__init__()
        self._slow_stores |= {tier.kind for tier in tiers}


class SimulatedCache:
    """Rows of running requests over one pool. `listener` hears of the pages of the tree."""

    def __init__(
        self, calibration: Calibration, tiers: Sequence[SimulatedTier] = (), listener: KeyListener | None = None
    ):
        self.config, self.tiers, self.page_size = calibration, tiers, calibration.page_size
        self.listener = listener
        self.tree_keys = set[bytes]()  # of the whole pages in the tree
        self.pool = PagePool(calibration.num_pages + 1)
        self.tree = RadixTree(self.pool, self.page_size)
        self.pool.evict_callback, self.tree.on_evict = self.tree.evict, self._offload_evicted
        self.cost_model = SimulatedCostModel(tiers)
        self.pages: dict[int, Ints] = {}  # by row: a page for each page of its text
        self.loads: dict[int, dict[SimulatedTier, list[bytes]]] = {}  # by row, until the step that reads them has ended
        self.num_loaded_tokens = dict.fromkeys((tier.kind for tier in tiers), 0)
        self._row_numbers = itertools.count()

    # ---- capacity ------------------------------------------------------------------------------------------------

    @property
    def prefix_cache(self) -> SimulatedCache:
        """This cache: the scheduler asks it for shared pages, too."""
        return self

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""
        return self.config.max_running_requests - len(self.pages)

    @property
    def total_pages(self) -> int:
        """Pages of the empty pool."""
        return self.pool.num_pages - 1

    @property
    def free_pages(self) -> int:
        """Pages that a request can get now."""
        return self.pool.num_free + self.tree.num_evictable_pages

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages of a text."""
        return -(-length // self.page_size)

    def num_shared_pages(self, query: PrefixQuery) -> int:
        """Return how many pages of the text are in other rows already."""
        match = self._match_prefix(query)
        if not match:
            return 0
        shared = match.pages[..., : match.length // self.page_size]
        return int(np.count_nonzero(self.pool.ref_counts[shared] > 1))

    def unpin_all(self) -> bool:
        """Return whether there were pins: there are none."""
        return False

    # ---- rows ----------------------------------------------------------------------------------------------------

    def open_row(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> int:
        """Open a row. It owns no pages yet."""
        row = next(self._row_numbers)
        self.pages[row] = np.zeros(0, np.int32)
        return row

    def reserve(self, row: int, end_position: int, scoring: bool = False) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few."""
        n = -(-end_position // self.page_size) - len(self.pages[row])
        if n <= 0:
            return True
        if not self.pool.ensure_free(n):
            return False
        self.pages[row] = np.concatenate([self.pages[row], self.pool.allocate(n)])
        return True

    def close_row(self, row: int) -> list[int]:
        """Free the row's pages. Returns nothing: slots are not counted by layer."""
        self.loads.pop(row, None)
        self.pool.free(self.pages.pop(row))
        return []

    def tokens_until_eviction(self, row: int, num_computed_tokens: int) -> int:
        """Return how many tokens can be computed before the row evicts: it never does."""
        return UNBOUNDED

    def needs_single_step(self, row: int) -> bool:
        """Return whether all tokens must be computed in one step: never."""
        return False

    def shrink_budget(self, row: int, num_computed_tokens: int) -> bool:
        """Return whether a budget gave pages back: there is none."""
        return False

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def attach_prefix(self, row: int, query: PrefixQuery, was_preempted: bool = False) -> tuple[int, int]:
        """Begin an empty row with the longest prefix that the tree has, and with pages of tiers where loading pays.

        Returns the number of computed tokens, and 0: no position is worth a branch point.
        """
        match, S = self._match_prefix(query), self.page_size
        loads, end_page = self._plan_load(query, match)
        length = end_page * S if loads else match.length if match else 0
        matched = match.pages[0, 0] if match else np.zeros(0, np.int32)
        num_shared = match.length // S if match else 0
        held = matched[:num_shared] if loads else matched  # a page that agrees in part is copied
        num_own = -(-length // S) - num_shared
        self.pool.incref(held)  # before ensure_free, which may evict them
        has_room = self.pool.ensure_free(num_own)
        self.pool.free(held[num_shared:] if has_room else held)
        if not has_room:
            return 0, 0
        self.pages[row] = np.concatenate([held[:num_shared], self.pool.allocate(num_own)])
        if loads:
            self.loads[row] = loads
            for tier, keys in loads.items():
                self.num_loaded_tokens[tier.kind] += len(keys) * self.page_size
        return length, 0

    def _match_prefix(self, query: PrefixQuery) -> PrefixMatch | None:
        return self.tree.match_prefix(ROOT_HASH, query.tokens, query.max_skipped_tokens, has_sliding_layers=False)

    def _plan_load(self, query: PrefixQuery, match: PrefixMatch | None) -> tuple[dict[SimulatedTier, list[bytes]], int]:
        """Return the pages to read behind the match, by tier, and the page at which they end; none where it is slower.

        The rule is that of `PrefixCache`.
        """
        if not self.tiers:
            return {}, 0
        tokens = np.asarray(query.tokens[: query.max_skipped_tokens], np.int32)
        keys = self.tree.hash_blocks(ROOT_HASH, tokens)
        length = match.length if match else 0
        end_page = length // self.page_size
        loads: dict[SimulatedTier, list[bytes]] = {}
        for key in keys[end_page:]:
            tier = next((t for t in self.tiers if key in t), None)
            if tier is None:
                break
            loads.setdefault(tier, []).append(key)
            end_page += 1
        if end_page * self.page_size <= length:
            return {}, 0
        for tier, found in loads.items():
            tier.touch(found)
        num_bytes = {tier.kind: len(found) * tier.page_bytes for tier, found in loads.items()}
        num_tokens = end_page * self.page_size - length
        compute_seconds = self.cost_model.compute_seconds(num_tokens)
        latency = max(tier.config.latency for tier in loads)
        time_limit = min(tier.time_limit(compute_seconds) for tier in loads)
        pays = self.cost_model.should_load(num_bytes, num_tokens, latency, time_limit)
        return (loads, end_page) if pays else ({}, 0)

    def finish_loads(self, rows: Sequence[int]) -> float:
        """End the loads of these rows. Returns the seconds that their reads take, one after the other."""
        seconds = 0.0
        for row in rows:
            for tier, keys in self.loads.pop(row, {}).items():
                read_s = tier.read(keys)
                self.cost_model.record_read(tier.kind, len(keys) * tier.page_bytes, read_s)
                seconds += read_s
                if not tier.write_through:
                    tier.remove(keys)  # the tree will have them
        return seconds

    def store_prefix(self, row: int, entry: PrefixEntry, still_running: bool = False) -> None:
        """Keep the pages of the row's text for others; of a row that is still running only whole pages."""
        S, end = self.page_size, len(entry.tokens)
        end = end // S * S if still_running else end
        if not end or row in self.loads:
            return
        tokens = np.asarray(entry.tokens[:end], np.int32)
        keys = self.tree.hash_blocks(ROOT_HASH, tokens)
        for tier in self.tiers:
            if tier.write_through:
                tier.add(keys)
        self.tree.insert(ROOT_HASH, entry.tokens[:end], self.pages[row][None, None, : -(-end // S)])
        new = [key for key in keys if key not in self.tree_keys]
        self.tree_keys.update(new)
        if self.listener:
            self.listener.on_stored(new)

    def _offload_evicted(self, node: Node, num_kept_pages: int) -> None:
        """Offload the whole pages that a leaf loses."""
        if len(node.tokens) == len(node.block_hashes) * self.page_size:
            keys = node.block_hashes[num_kept_pages:]
            self.tree_keys.difference_update(keys)
            if self.listener:
                self.listener.on_evicted(keys)
            for tier in self.tiers:
                tier.add(keys)

    # ---- the accountant ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every page is free, or in rows or in the tree. Raises AssertionError."""
        self.pool.check(np.concatenate([*self.pages.values(), self.tree.all_pages]))
