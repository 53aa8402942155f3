"""The cache of a simulated replica: the engine's own pool and radix tree, with tables of pages but no K and V.

It does for models without sliding layers, and the policy `full`, what `KVCacheManager` and its rows do for the
`Scheduler`. One page stands for the pages of all layers and heads, which come and go together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from retain.kv.checkpoints import TextCheckpoint
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.memory.block_tables import UNBOUNDED
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.node import Node
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.prefix.start import Begun, Start
from retain.kv.row_task import RowTask
from retain.kv.stats.request import LoadStats, RequestMemory
from retain.kv.stores.cost_model import LoadCostModel
from retain.kv.text import Text
from retain.types import Ints
from tools.simulation.calibration import Calibration
from tools.simulation.tiers import KeyListener, SimulatedTier

FULL = EvictionPolicy()
FIRST_LINK = b""  # of all texts: one model, one tenant


class SimulatedCostModel(LoadCostModel):
    """The engine's rule of loading; it logs no warning, for nobody can repair a simulated store."""

    def __init__(self, tiers: Sequence[SimulatedTier]):
        super().__init__()
        self._slow_stores |= {tier.kind for tier in tiers}


class SimulatedRow:
    """Pages of one running request, and what it loads. It keeps all its tokens, so it never evicts."""

    def __init__(self, cache: SimulatedCache, index: int):
        self.cache = cache
        self.index = index
        self.task: RowTask | None = None
        self.num_computed = 0
        self.pages: Ints = np.zeros(0, np.int32)  # one for each page of its text
        self.loads: dict[SimulatedTier, list[bytes]] = {}  # until the step that reads them has ended

    @property
    def num_pages(self) -> int:
        """Pages that the row owns now."""
        return len(self.pages)

    def start(self, task: RowTask, found: Start) -> Begun:
        """Begin with the longest prefix that the tree has, and with pages of tiers where loading pays."""
        self.task = task
        self.num_computed = self._attach(found)
        return Begun(self.num_computed)

    def _attach(self, start: Start) -> int:
        cache = self.cache
        S = cache.page_size
        loads, end_page = cache.plan_load(start)
        length = end_page * S if loads else start.position
        num_shared = start.position // S
        matched = start.blocks[0] if start.blocks.size else np.zeros(0, np.int32)
        held = matched[:num_shared] if loads else matched  # a page that agrees in part is copied
        num_own = -(-length // S) - num_shared
        cache.pool.incref(held)  # before ensure_free, which may evict them
        has_room = cache.pool.ensure_free(num_own)
        cache.pool.free(held[num_shared:] if has_room else held)
        if not has_room:
            return 0
        cache.tree.touch(start.nodes)
        self.pages = np.concatenate([held[:num_shared], cache.pool.allocate(num_own)])
        self.loads = loads
        for tier, keys in loads.items():
            cache.num_loaded_tokens[tier.kind] += len(keys) * S
        return length

    def fork(self, policy: EvictionPolicy, num_computed_tokens: int, task: RowTask | None = None) -> None:
        """Return None: every request computes its own prompt."""
        return

    def reserve(self, end_position: int) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few."""
        n = -(-end_position // self.cache.page_size) - len(self.pages)
        if n <= 0:
            return True
        if not self.cache.pool.ensure_free(n):
            return False
        self.pages = np.concatenate([self.pages, self.cache.pool.allocate(n)])
        return True

    def next_stop(self, position: int) -> int:
        """Return a position that no text reaches: nothing is due before."""
        return UNBOUNDED

    def advance(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Share the whole pages of the prompt once it is complete."""
        before = self.num_computed
        self.num_computed = num_computed_tokens
        if self.task and before < self.task.prompt_len <= num_computed_tokens:
            self._store_prefix(num_computed_tokens // self.cache.page_size * self.cache.page_size)

    def shrink(self, num_computed_tokens: int) -> bool:
        """Return whether a budget gave pages back: there is none."""
        return False

    def finish_load(self) -> LoadStats | None:
        """End the load of the prefix after the step: simulated reads never fail."""
        self.loads = {}
        return None

    def close(self) -> RequestMemory:
        """Leave the text to others, and free the row's pages. Slots are not counted by layer."""
        num_pages = self.num_pages
        self._store_prefix(self.num_computed)
        self.cache.pool.free(self.pages)
        del self.cache.rows[self.index]
        return RequestMemory([], [], num_pages)

    def _store_prefix(self, num_tokens: int) -> None:
        """Keep the pages of the text's first tokens, unless a part of them is being loaded."""
        if self.task and num_tokens and not self.loads:
            self.cache.store(self.task.text, num_tokens, self.pages[: -(-num_tokens // self.cache.page_size)])


class SimulatedCache:
    """Rows of running requests over one pool: a SchedulerCache. `listener` hears of the pages of the tree."""

    def __init__(
        self, calibration: Calibration, tiers: Sequence[SimulatedTier] = (), listener: KeyListener | None = None
    ):
        self.tiers = tiers
        self.page_size = calibration.page_size
        self.max_batched_tokens = calibration.max_batched_tokens
        self.max_running_requests = calibration.max_running_requests
        self.listener = listener
        self.tree_keys = set[bytes]()  # of the whole pages in the tree
        self.pool = PagePool(calibration.num_pages + 1)
        self.tree = RadixTree(self.pool, self.page_size)
        self.pool.evict_callback = self.tree.evict
        self.tree.on_evict = self._offload_evicted
        self.cost_model = SimulatedCostModel(tiers)
        self.rows: dict[int, SimulatedRow] = {}  # open ones, by index
        self.num_loaded_tokens = dict.fromkeys((tier.kind for tier in tiers), 0)
        self._row_numbers = itertools.count()

    # ---- capacity ------------------------------------------------------------------------------------------------

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""
        return self.max_running_requests - len(self.rows)

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

    def find(self, policy: EvictionPolicy, task: RowTask) -> Start:
        """Return where a row may begin."""
        demand = task.demand(policy)
        match = self.tree.match_prefix(FIRST_LINK, task.text, demand.max_length)
        S = self.page_size
        shared = match.pages[:, : match.length // S]
        return Start(
            task.text,
            demand,
            match.length,
            match.pages[:, : -(-match.length // S)],
            nodes=match.nodes,
            num_shared_pages=int(np.count_nonzero(self.pool.ref_counts[shared] > 1)),
        )

    def unpin_all(self) -> bool:
        """Return whether there were pins: there are none."""
        return False

    def open(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> SimulatedRow:
        """Open a row. It owns no pages yet."""
        index = next(self._row_numbers)
        self.rows[index] = SimulatedRow(self, index)
        return self.rows[index]

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def plan_load(self, start: Start) -> tuple[dict[SimulatedTier, list[bytes]], int]:
        """Return the pages to read behind a start, by tier, and the page at which they end; none where it is slower.

        The rule is that of `PrefixCache`.
        """
        if not self.tiers:
            return {}, 0
        keys = start.text.block_hashes(FIRST_LINK, self.page_size, start.demand.max_length)
        length = start.position
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

    def read_loads(self, rows: Iterable[int]) -> float:
        """Read what the rows of these indices load. Returns the seconds that this takes, one after the other."""
        seconds = 0.0
        for index in rows:
            for tier, keys in self.rows[index].loads.items():
                read_s = tier.read(keys)
                self.cost_model.record_read(tier.kind, len(keys) * tier.page_bytes, read_s)
                seconds += read_s
                if not tier.write_through:
                    tier.remove(keys)  # the tree will have them
            self.rows[index].finish_load()
        return seconds

    def store(self, text: Text, num_tokens: int, pages: Ints) -> None:
        """Keep the pages of the first tokens of a text that a row has computed."""
        keys = text.block_hashes(FIRST_LINK, self.page_size, num_tokens)
        for tier in self.tiers:
            if tier.write_through:
                tier.add(keys)
        self.tree.insert(FIRST_LINK, text, num_tokens, pages[None])
        new = [key for key in keys if key not in self.tree_keys]
        self.tree_keys.update(new)
        if self.listener:
            self.listener.on_stored(new)

    def _offload_evicted(self, node: Node, num_kept_pages: int, checkpoints: Mapping[bytes, TextCheckpoint]) -> None:
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
        self.pool.check(np.concatenate([*(row.pages for row in self.rows.values()), self.tree.all_pages]))
