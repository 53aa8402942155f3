"""The KV cache manager: what concerns all rows of a cache.

It opens rows (row.py), says what there is room for, maps fresh tokens to slots, and counts pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain.kernels.api import KV, NO_WINDOW, GroupInputs, Tables
from retain.kernels.transfers import to_device
from retain.kv.capacity import CapacityPlanner
from retain.kv.draft_tables import DraftTables
from retain.kv.eviction import policies
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.evictor import evict_rows
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import KeyTransform
from retain.kv.hints import CacheHints
from retain.kv.journal import journaled
from retain.kv.memory.block_layout import BlockLayout, block_layout
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.kv.memory.cache import KVCache
from retain.kv.memory.device_rows import upload_rows
from retain.kv.memory.group_pages import first_attention_group
from retain.kv.memory.grouped_cache import GroupedKVCache
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.quantized_copies import QuantizedCopies
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.config import PrefixConfig
from retain.kv.prefix.start import Start
from retain.kv.row import CacheParts, Row
from retain.kv.row_task import RowTask
from retain.kv.stats.pool import PageStates, PoolStats, classify_pages, count_slots
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
        self.page_size = c.page_size  # slots of a page, in the layers whose slots take the most bytes
        self.max_batched_tokens = c.max_batched_tokens  # fresh tokens of a step
        self.max_running_requests = c.max_running_requests  # rows, open or not
        self.max_model_len = c.max_model_len  # tokens of the longest text
        self.store = store
        self.pool = store.pool
        self.kv = store.kv
        self.backend = store.backend
        self.slots = GroupedKVCache([KVCache(t, c.max_batched_tokens) for t in _open_tables(planner, store)])
        self.tables = self.slots.tables[0]  # of the first group; its rows are those of all groups
        self.copies = QuantizedCopies(self.tables, self._ensure_unused)  # of rows that a drafter copies
        prefix_cache = PrefixCache(self.slots.tables, planner, prefix_config)
        self.parts = CacheParts(planner, self.slots, prefix_cache, self.copies, key_transform or KeyTransform())
        self.hints = CacheHints(self.parts)
        self.pool.evict_callback = self._free_unneeded

    @property
    def prefix_cache(self) -> PrefixCache:
        """The cache of the prefixes of earlier texts."""
        return self.parts.prefix_cache

    @contextmanager
    def without_prefixes(self) -> Iterator[None]:
        """Let rows that are opened while the context lasts find and leave no prefixes, and count no evictions.

        Other ranks do not know of it: there must be none.
        """
        assert self.parts.journal is None
        config = self.prefix_cache.config
        num_evicted_slots = self.parts.num_evicted_slots.copy()
        self.prefix_cache.config = None
        try:
            yield
        finally:
            self.prefix_cache.config = config
            self.parts.num_evicted_slots = num_evicted_slots

    def copy_trash_pages(self) -> None:
        """Copy the trash page of each group onto itself: a request that copies pages finds the kernel compiled."""
        trash = np.zeros(1, np.int32)
        for tables in self.slots.tables:
            tables.store.copy(trash, trash)

    @property
    def rows(self) -> Mapping[int, Row]:
        """The open rows, by index."""
        return self.parts.rows

    # ---- capacity ------------------------------------------------------------------------------------------------

    @property
    def block_layout(self) -> BlockLayout:
        """Which pages of each KV cache group make up such a block."""
        return block_layout(self.slots.tables, [group.windows for group in self.spec.groups])

    @property
    def free_pages(self) -> int:
        """Pages that a request can get now: free, or held by the prefix cache, a hint or a quantized copy only."""
        num_unneeded = self.prefix_cache.tree.num_evictable_pages + self.hints.num_reclaimable_pages
        return self.pool.num_free + num_unneeded + self.copies.num_pages

    @property
    def total_pages(self) -> int:
        """Pages of the empty pool."""
        return self.pool.num_pages - 1

    @property
    def free_rows(self) -> int:
        """Requests that can still be opened."""
        return len(self.tables.free_rows) + len(self.hints.loading)

    @contextmanager
    def limit_pages(self, num_pages: int) -> Iterator[None]:
        """Leave only so many pages in the pool, for as long as the context lasts; no request may run at its ends.

        Raises ValueError where there are other ranks, whose pools stay as they are.
        """
        if self.parts.journal is not None:
            raise ValueError("the pool of several ranks cannot be limited: use tensor_parallel=1")
        taken = self.pool.allocate(max(self.pool.num_free - num_pages, 0))
        try:
            yield
        finally:
            self.pool.free(taken)

    def plan_policy(self, policy: EvictionPolicy, prompt_len: int, num_system_tokens: int = 0) -> EvictionPolicy:
        """Return a policy as this cache carries it out for a prompt: resolved, and fitted. Raises ValueError.

        `num_system_tokens`: first tokens of the prompt that are a system prompt.
        """
        return self.planner.effective_policy(policy.resolve(prompt_len, num_system_tokens))

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages that a request owns at most on the way to `length` tokens."""
        return self.planner.pages_needed(policy, length, num_uncomputed_tokens)

    @property
    def page_bytes(self) -> int:
        """K, V, positions and mass of a page."""
        return self.store.page_bytes

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def find(self, policy: EvictionPolicy, task: RowTask) -> Start:
        """Return where a row that computes a task under this policy may begin, and what it shares with others then."""
        self.hints.end_loads(task.text)
        return self.prefix_cache.find(task.text, task.demand(policy))

    @journaled
    def unpin_all(self) -> bool:
        """Drop all pins of prefixes. Returns whether there were any."""
        return self.prefix_cache.tree.unpin_all()

    # ---- rows -----------------------------------------------------------------------------------------------------

    @journaled
    def open(self, policy: EvictionPolicy, num_uncomputed_tokens: int) -> Row:
        """Open a row for a request with so many uncomputed tokens and this resolved policy. It owns no pages yet."""
        if not self.tables.free_rows:
            self.hints.discard_loads()
        return Row(self.parts, policy, num_uncomputed_tokens)

    def open_draft_tables(self, dtype: torch.dtype | None) -> DraftTables:
        """Return tables for a drafter that attends to pages of rows, or to copies in `dtype`. Raises ValueError."""
        if self.parts.journal is not None:
            raise ValueError("needs the whole cache: with tensor_parallel use ngram, suffix or draft:model=M")
        if len(self.slots.groups) > 1:
            has_head = any(group.is_draft for group in self.spec.groups)
            reason = "one is that of a draft head" if has_head else "those of this model differ in heads or head dims"
            raise ValueError(f"needs layers that are alike: {reason}")
        return DraftTables(self.tables, self.copies, self.rows, dtype)

    # ---- a step --------------------------------------------------------------------------------------------------

    def group_inputs(self, rows: Ints, positions: Ints, tables: Sequence[Tables]) -> list[GroupInputs]:
        """Return what the layers of each group read and write, for fresh tokens of these rows and positions, both [T].

        `tables` are the pages that they attend to. On a device the slots follow from tables there.
        """
        if self.kv.device.type == "cpu":
            found = zip(self.slots.tables, tables, self.slot_mapping(rows, positions), strict=True)
            return [GroupInputs(t.kv, attended, slots) for t, attended, slots in found]
        return [self._device_inputs(t, rows, positions, own) for t, own in zip(self.slots.tables, tables, strict=True)]

    def _device_inputs(self, t: BlockTables, rows: Ints, positions: Ints, attended: Tables) -> GroupInputs:
        t.note_written(rows, positions)
        L, G = t.counts.shape[1:]
        rule = t.on_device.slot_rule(self._hole_indices(t, rows, positions), t.is_state)
        return GroupInputs(t.kv, attended, torch.zeros(L, G, 0, dtype=torch.int32), rule)

    def slot_mapping(self, rows: Ints, positions: Ints) -> list[Tensor]:
        """Return the slots of fresh tokens of these rows at these positions, both [T], in each KV cache group.

        int32 [L, G, T] each, on the pool's device.
        """
        for tables in self.slots.tables:
            tables.note_written(rows, positions)
        return [self._group_slots(group, rows, positions) for group in self.slots.groups]

    def _group_slots(self, group: KVCache, rows: Ints, positions: Ints) -> Tensor:
        tables = group.tables
        slots = group.slot_mapping(rows, positions)
        hole_indices = self._hole_indices(tables, rows, positions)
        if hole_indices is None:
            return to_device(torch.from_numpy(slots), self.kv.device)
        tokens = np.flatnonzero(hole_indices >= 0)
        evicting = rows[tokens]
        in_layer = tables.window[evicting].T == NO_WINDOW
        return tables.on_device.map_holes(slots, tokens, evicting, hole_indices[tokens], in_layer)

    def _hole_indices(self, tables: BlockTables, rows: Ints, positions: Ints) -> Ints | None:
        """Return the number of the hole that each token fills, or -1, int32 [T]; None where no row evicts."""
        evictors = [e for row in self.rows.values() for e in row.evictors if e.tables is tables and e.has_holes]
        if not evictors:
            return None
        holes_from = np.full(len(tables.allocated_upto), UNBOUNDED, np.int32)  # by row
        holes_from[[e.row for e in evictors]] = [e.holes_from for e in evictors]
        return np.maximum(positions - holes_from[rows], np.int32(-1))

    def attention_hook(
        self, rows: Sequence[int], first_positions: Sequence[int], query_start_loc: Sequence[int]
    ) -> Callable[[int, Tensor], None] | None:
        """Return what must be called before each layer of a step, with its queries; None where no row wants them.

        A row wants them while it loads, or where its policy scores them. Queries query_start_loc[b] :
        query_start_loc[b + 1] are those of rows[b], from its first position on.
        """
        ends = list(zip(rows, first_positions, query_start_loc, query_start_loc[1:], strict=False))
        loads = [(load, begin, end) for row, _, begin, end in ends if (load := self.rows[row].load)]
        blocks = [
            (evictor.query_blocks, first, begin, end)
            for row, first, begin, end in ends
            for evictor in self.rows[row].evictors
            if evictor.query_blocks.wants(range(first, first + end - begin))
        ]

        def before_attention(layer: int, q: Tensor) -> None:
            for load, begin, end in loads:
                load.wait_layer(layer, q[begin:end])
            for queries, first, begin, end in blocks:
                queries.add(layer, first, q[begin:end])
            if loads:
                for tables in self.slots.tables:
                    tables.on_device.rows.upload()  # selective loads shorten tables

        return before_attention if loads or blocks else None

    def build_tables(self, rows: Tensor, query_start_loc: Tensor) -> list[Tables]:
        """Return the tables of each KV cache group, see DeviceTables.build_tables. One upload for all of them."""
        demoted = [tables.demoted.rows for tables in self.slots.tables if tables.demoted]
        upload_rows([*(tables.on_device.rows for tables in self.slots.tables), *demoted])
        return [tables.on_device.build_tables(rows, query_start_loc) for tables in self.slots.tables]

    @property
    def pools(self) -> list[KV]:
        """The memory as pages of each KV cache group, then of the demoted slots of those groups that have some."""
        tables = self.slots.tables
        return [*(t.kv for t in tables), *(t.demoted.store.kv for t in tables if t.demoted)]

    def may_exchange(self, method: str) -> bool:
        """Return whether ranks compare heads in a call of this method."""
        return method == "evict" and any(row.policy.compares_heads for row in self.parts.due)

    @journaled
    def evict(self) -> None:
        """Evict from all rows whose budget is full, together, after rows were advanced. Rings shrink that may."""
        due = self.parts.due
        if not due:
            return
        self.parts.due = {}
        evicting = [row for row in due if row.must_evict]
        for tables in self.slots.tables:
            evict_rows((e, row.num_computed) for row in evicting for e in row.evictors if e.tables is tables)
        for row, rings_shrink in due.items():
            row.finish_eviction(rings_shrink)

    @journaled
    def reject(self, rows: Ints, positions: Ints) -> None:
        """Turn the slots of rejected drafts, of these rows at these positions, both [n], into holes."""
        for tables, slots in zip(self.slots.tables, self.slot_mapping(rows, positions), strict=True):
            tables.kv.pos.view(-1)[slots.long()] = -1

    # ---- statistics and the accountant ---------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every page is free, or in the tables of open rows or of the tree. Raises AssertionError."""
        assert sorted(self.rows) == self.tables.open_rows, "a row was closed without its tables, or never closed"
        in_tables = self.slots.page_list(self.tables.open_rows)
        tree = self.prefix_cache.tree
        tree.check()
        self.pool.check(np.concatenate([in_tables, *self._pages_beside_tables().values(), tree.all_pages]))

    def classify_pages(self) -> tuple[PageStates, Ints]:
        """Return the state of every page, and the row that holds it; between two steps."""
        evicting = {index for index, row in self.rows.items() if row.evictors}
        num_holders = self.prefix_cache.tree.num_holders
        return classify_pages(self.slots.tables, num_holders, self._pages_beside_tables(), evicting)

    def pool_stats(self) -> PoolStats:
        """Count slots and pages by what they are used for, between two steps."""
        slots, pages, num_holes = count_slots(self.tables, self.classify_pages()[0])
        prefix = self.prefix_cache
        resident = [t.kv.resident for t in self.slots.tables if t.kv.resident]
        num_loaded = sum(r.num_loaded for r in resident)
        in_memory = sum(r.num_read for r in resident) - num_loaded
        num_checkpoints, num_checkpoint_pages = prefix.checkpoint_stats()
        return PoolStats(
            slots_by_state=slots,
            num_holes=num_holes,
            page_bytes=self.store.page_bytes,
            pages_by_state=pages,
            prefix_hit_tokens=prefix.hits_by_source(),
            tier_stats=prefix.tier_stats(),
            num_queried_tokens=prefix.num_queried_tokens,
            num_checkpoints=num_checkpoints,
            num_checkpoint_pages=num_checkpoint_pages,
            looked_slots={"memory": in_memory, "file": num_loaded} if resident else {},
        )

    def evicted_slots(self) -> dict[str, int]:
        """Return the slots that budgets evicted since the start, by policy."""
        found = self.parts.num_evicted_slots.copy()
        for row in self.rows.values():
            for evictor in row.evictors:
                found[policies.name_of(evictor.policy)] += evictor.num_evicted
        return dict(found)

    def request_stats(self, policy: EvictionPolicy, num_tokens: int, memory: RequestMemory) -> dict[str, Any]:
        """Return the bytes and slots that a request took; see stats.request."""
        spec = policies.to_spec(policy)
        return request_memory_stats(
            policy=spec,
            unwindowed=spec if policy.ring_window is None else "full",
            layers=self.planner.layer_sizes(policy),
            num_tokens=num_tokens,
            memory=memory,
            page_bytes=self.store.page_bytes,
        )

    def _pages_beside_tables(self) -> dict[int, Ints]:
        """Return the pages that each open row holds beside its tables, by index."""
        return {
            i: np.concatenate([r.extra_pages, *([r.copy.page_list] if r.copy else [])]) for i, r in self.rows.items()
        }

    def _ensure_unused(self, n: int) -> bool:
        """Return whether n pages are free that no row uses, quantized copies included."""
        if n > self.pool.num_free + self.prefix_cache.tree.num_evictable_pages:
            return False
        return self.pool.ensure_free(n)

    def _free_unneeded(self, num_pages: int) -> None:
        """Free pages that no request needs: cached prefixes, and loads and quantized copies where these are too few."""
        wanted = self.pool.num_free + num_pages
        if self.pool.num_free + self.prefix_cache.tree.num_evictable_pages < wanted:
            self.hints.discard_loads()
        for _, row in sorted(self.rows.items()):
            if self.pool.num_free + self.prefix_cache.tree.num_evictable_pages < wanted:
                row.drop_copy()
        if wanted > self.pool.num_free:
            self.prefix_cache.tree.evict(wanted - self.pool.num_free)


def _open_tables(planner: CapacityPlanner, store: PageStore) -> list[BlockTables]:
    """Return the tables of each KV cache group, over pages of one pool.

    `store` has those of the first group that attends.
    """
    c = planner.config
    first = first_attention_group(planner.spec)
    found = []
    for i, group in enumerate(planner.groups):
        own = store if i == first or planner.pages is None else store.reinterpret(planner.pages.formats[i])
        demoted = own.in_dtype(DEMOTED_DTYPE) if c.demoted_page_size and not group.group.is_state else None
        most = group.max_pages_per_head
        found.append(BlockTables(own, c.max_running_requests, group.group, most, demoted, group.block_size))
    return found
