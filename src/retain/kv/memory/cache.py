"""The slot algebra of a batch: which pages a request owns, and the slots of fresh tokens, in all layers and heads.

A request that runs has a row. Row, layer and kv head have a list of pages; row and layer have a ring, given by two
numbers:

    place(pos) = (pos - base) mod capacity          slot = pages[place // S] * S + place % S

`full` is a ring whose capacity is never reached. A ring of window W that is written T fresh tokens at a time has room
for W + T - 1 slots, so that no chunk overwrites a key that one of its own queries still sees; rounded up to whole
pages, and at least W + S - 1, so that no page ever mixes tokens that are alive with tokens that are not. That makes
`settle` a change of labels: after the prompt the pages with live tokens come first, the others go back, and nothing
moves.

        pages  | 8 9 | 2 3 | 4 5 | 6 7 |     S = 2, capacity 8, W = 3, next token 10: 8 and 9 (and 7) are alive
    settle ->  | 6 7 | 8 9 |                 base 6, capacity 4

The verbs: `open` a row, `grow` it (takes pages), `place` fresh tokens (their slots), `settle`, `close` (gives pages
back). What is not known here: what K and V look like, who is scheduled and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import CPU, NO_WINDOW, page_bytes
from retain.kv.capacity import UNBOUNDED, CapacityPlanner, KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.operations import ShiftKeys
from retain.kv.eviction.policies import Policy
from retain.kv.eviction.row import BudgetEvictor
from retain.kv.memory.device_tables import DeviceTables
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.attach import EXTRA_TABLE_PAGES, fork
from retain.kv.prefix.cache import PrefixCache, PrefixConfig
from retain.kv.stats.attention_trace import AttentionTrace

Ints = NDArray[np.int32]


class Cache(CapacityPlanner):
    """Rows of tables over one pool of pages. `max_running_requests` requests may run at once, each up to `context` tokens long.

    `columns`: of masses, one for each query head of a kv head, or one for all. `turn`: keys to other positions, where
    the model turns them. `prefix`: what requests leave to others; None: nothing.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        backend: ModuleType,
        dtype: torch.dtype,
        kv_memory: int,
        page_size: int,
        max_running_requests: int,
        max_model_len: int,
        max_batched_tokens: int,
        score_columns: int = 1,
        shift_keys: ShiftKeys | None = None,
        prefix_config: PrefixConfig | None = None,
        device: torch.device = CPU,
    ):
        L, G, n = len(spec.windows), spec.kv_heads, -(-max_model_len // page_size)
        super().__init__(spec, page_size, max_running_requests, max_model_len, max_batched_tokens)
        self.page_bytes = page_bytes(page_size, spec.head_dim, dtype, score_columns)
        self.pool = PagePool(
            1 + min(max(kv_memory // self.page_bytes - 1, 0), max_running_requests * L * G * n)
        )  # page 0 is paid for too
        self.kv = backend.allocate(self.pool.num_pages, page_size, spec.head_dim, dtype, score_columns, device)
        self.pages: Ints = np.zeros((max_running_requests, L, G, n + EXTRA_TABLE_PAGES), np.int32)
        self.counts: Ints = np.zeros((max_running_requests, L, G), np.int32)
        self.peak_counts: Ints = np.zeros((max_running_requests, L, G), np.int32)  # most pages ever owned
        self.ring_base: Ints = np.zeros((max_running_requests, L), np.int32)
        self.headroom: Ints = np.zeros(
            (max_running_requests, L), np.int32
        )  # slots owned beyond those of the tokens there are
        self.capacity: Ints = np.full((max_running_requests, L), UNBOUNDED, np.int32)
        self.window: Ints = np.full((max_running_requests, L), NO_WINDOW, np.int32)
        self.allocated_upto = [0] * max_running_requests  # positions below this have their pages in every layer
        self.rings_shrunk = [False] * max_running_requests
        self.position_offset: Ints = np.zeros(max_running_requests, np.int32)  # position = place in the text - shift
        self.free_row_ids = list(range(max_running_requests - 1, -1, -1))  # free rows
        self.evictors: dict[int, BudgetEvictor] = {}  # of rows with a budget
        self.evicted_slots: Counter[str] = Counter()  # slots of rows that are closed, by policy
        self.backend, self.shift_keys = backend, shift_keys
        self.prefix_cache: PrefixCache | None = None
        if prefix_config:
            self.prefix_cache = PrefixCache(self, prefix_config)
            self.pool.evict_callback = self.prefix_cache.tree.evict
        self.device_tables = DeviceTables(self.pages, self.counts, self.window, device)  # where the kernels read them

    # ---- what there is ---------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now."""
        return self.pool.num_free + (self.prefix_cache.tree.num_evictable_pages if self.prefix_cache else 0)

    @property
    def total_pages(self) -> int:
        """Pages that the empty pool has."""
        return self.pool.num_pages - 1

    @property
    def free_rows(self) -> int:
        """Requests that may still be opened."""
        return len(self.free_row_ids)

    # ---- the life of a row ---------------------------------------------------------------------------------------

    def open(self, policy: Policy, num_uncomputed_tokens: int) -> int:
        """A row for a request that owes `owed` tokens. It owns no pages yet."""
        row = self.free_row_ids[-1]
        self.window[row] = self.windows(policy)
        self.capacity[row] = self.capacities(self.window[row], min(num_uncomputed_tokens, self.max_batched_tokens))
        self.ring_base[row] = self.counts[row] = self.peak_counts[row] = self.allocated_upto[row] = 0
        self.rings_shrunk[row] = False
        self.headroom[row] = self.position_offset[row] = 0
        layers = np.flatnonzero(self.window[row] == NO_WINDOW).astype(np.int32)
        if isinstance(policy, BudgetPolicy):
            self.evictors[row] = BudgetEvictor(
                *(policy, layers, self.kv, self.backend, self.pool, self.pages[row], self.counts[row], self.shift_keys)
            )
            self.capacity[row, layers] = min(
                policy.prefill_slots, (self.pages.shape[3] - EXTRA_TABLE_PAGES) * self.page_size
            )
            if policy.prompt_len > policy.budget_tokens:  # streams all at once: chunks come into holes
                self.headroom[row, layers] = UNBOUNDED if policy.prefill == "stream" else policy.interval
        self.device_tables.mark_dirty(row, dense=not isinstance(policy, BudgetPolicy))
        self.free_row_ids.pop()  # nothing has failed
        return row

    def fork(self, row: int, policy: Policy, num_computed_tokens: int) -> int | None:
        """A row with what another has computed, its prompt, to go on under a policy of its own.

        Whole pages that neither will write are shared, the others copied. None where there are no pages or no row, or
        where the row was born evicted.
        """
        if not self.free_row_ids or (self.prefix_cache and row in self.prefix_cache.sparse_rows):
            return None
        return fork(self, row, policy, num_computed_tokens)

    def tokens_until_eviction(self, row: int, num_computed_tokens: int) -> int:
        """How many tokens of the row may be computed at once: no budget may be passed over."""
        keeper = self.evictors.get(row)
        return keeper.next_eviction - num_computed_tokens if keeper else UNBOUNDED

    def needs_single_step(self, row: int) -> bool:
        """Whether what the row owes up to its next moment of forgetting must be computed in one step."""
        keeper = self.evictors.get(row)
        return keeper is not None and keeper.needs_layerwise_prefill

    def reserve(self, row: int, end_position: int) -> bool:
        """Own the pages for all positions below `upto`. False, and none taken for them, when the pool has too few."""
        keeper = self.evictors.get(row)
        if keeper and keeper.starts_reread(end_position) and not keeper.snapshot_rings():
            return False
        if keeper and keeper.needs_layerwise_prefill and not keeper.allocate_scratch():
            return False
        if end_position <= self.allocated_upto[row]:
            return True
        S = self.page_size
        had = self.counts[row]  # [L, G]
        slots = np.minimum(end_position - self.ring_base[row] + self.headroom[row], self.capacity[row])  # [L]
        want = np.maximum(-(-slots // S)[:, None], had)
        n = int((want - had).sum())
        if not self.pool.ensure_free(n):
            return False
        if n:
            taken = self.pool.allocate(n)
            self.kv.pos[self.kv.to_index(taken)] = -1  # whoever had them before left positions behind
            j = np.arange(want.max())
            new = (j >= had[..., None]) & (j < want[..., None])  # [L, G, n]
            self.pages[row, :, :, : len(j)][new] = np.sort(taken)  # a head's pages side by side, as far as they go
            self.counts[row] = want
            np.maximum(self.peak_counts[row], self.counts[row], out=self.peak_counts[row])
            self.device_tables.mark_dirty(row)
        if keeper and keeper.scratch_pages is not None:  # in one layer at a time
            layer = keeper.layers[0]
            self.peak_counts[row, layer] = self.counts[row, layer] + keeper.scratch_pages.shape[1]
        owned = want[:, 0] * S
        paid = np.where(owned >= self.capacity[row], UNBOUNDED, self.ring_base[row] + owned - self.headroom[row])
        self.allocated_upto[row] = int(paid.min())
        return True

    def compute_slot_mapping(self, rows: Ints, pos: Ints) -> Tensor:
        """The slots of fresh tokens of these rows at these places in their texts, both [T] -> int32 [L, G, T]."""
        S = self.page_size
        places = ((pos[:, None] - self.ring_base[rows]) % self.capacity[rows]).T  # [L, T]
        L = len(places)
        pages = self.pages[rows, np.arange(L)[:, None], :, places // S]  # [L, T, G]
        slots = (pages * np.int32(S) + (places % S)[:, :, None].astype(np.int32)).transpose(0, 2, 1)  # [L, G, T]
        since = np.full(len(self.allocated_upto), UNBOUNDED, np.int64)  # from where on tokens of a row come into holes
        for row, keeper in self.evictors.items():
            mine = np.flatnonzero(rows == row)
            if len(mine) and (lent := keeper.scratch_slots(pos[mine])) is not None:
                slots[keeper.layers[:, None], :, mine] = lent.T
            elif keeper.holes is not None:
                since[row] = keeper.holes_from
        whose = np.flatnonzero(pos >= since[rows])
        forget, inside = rows[whose], self.window[rows[whose]].T == NO_WINDOW
        return self.device_tables.map_holes(slots, whose, forget, pos[whose] - since[forget], inside)

    def start_layerwise(
        self, rows: Sequence[int], traces: Sequence[AttentionTrace | None]
    ) -> Callable[[int], None] | None:
        """Before a step: whose prompt goes layer by layer looks at borrowed pages. Who computes calls what this returns
        when a layer has looked; None: there is no need.
        """
        pairs = zip(rows, traces, strict=True)
        keepers = {
            row: k.start_layerwise(witness)
            for row, witness in pairs
            if (k := self.evictors.get(row)) and k.needs_layerwise_prefill
        }
        self.device_tables.dirty_rows.update(keepers)

        def after(layer: int) -> None:
            for row, keeper in keepers.items():
                keeper.finish_layer(layer)
                self.device_tables.mark_dirty(row)
                if keeper.scratch_pages is None:
                    self._update_holes(row)

        return after if keepers else None

    def _update_holes(self, row: int) -> None:
        """A row's keeper has other holes."""
        keeper = self.evictors[row]
        self.device_tables.mark_dirty(row)
        if keeper.holes is not None:
            self.device_tables.set_holes(row, keeper.layers, keeper.holes)

    def commit(self, row: int, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """So many tokens are computed, so many more owed. Budgets forget what is over them. Where nothing is owed, one
        token a step will follow: rings shrink to their window and give the rest back.
        """
        keeper = self.evictors.get(row)
        if keeper and num_computed_tokens >= keeper.next_eviction:
            if keeper.evict(num_computed_tokens):
                self.capacity[row, keeper.layers] = 1  # where its tokens go is no closed form
            self._update_holes(row)
        self.position_offset[row] = keeper.position_offset if keeper else 0
        if num_uncomputed_tokens or self.rings_shrunk[row]:
            return
        self.rings_shrunk[row] = True
        S = self.page_size
        capacity = self.capacities(self.window[row], 1)
        given = []
        for layer in np.flatnonzero((capacity < self.capacity[row]) & (self.window[row] < NO_WINDOW)):
            n = int(self.counts[row, layer, 0])
            oldest = max(num_computed_tokens - int(self.window[row, layer]), 0)  # alive, or one more
            place = (oldest - self.ring_base[row, layer]) % self.capacity[row, layer]
            first, base = int(place // S), oldest - int(place % S)
            keep = -(-(num_computed_tokens - base) // S)
            table = np.roll(self.pages[row, layer, :, :n], -first, axis=1)
            self.pages[row, layer, :, :n] = table
            given.append(table[:, keep:].ravel())
            self.ring_base[row, layer], self.capacity[row, layer] = base, capacity[layer]
            self.counts[row, layer] = keep
            self.allocated_upto[row] = min(self.allocated_upto[row], base + keep * S)
        if given:
            self.pool.free(np.concatenate(given))
            self.device_tables.mark_dirty(row)

    def shrink(self, row: int, num_computed_tokens: int) -> bool:
        """Halve the row's budget, where its policy allows it. Whether pages were given back."""
        keeper = self.evictors.get(row)
        given = keeper is not None and keeper.shrink(num_computed_tokens)
        if keeper:
            self._update_holes(row)
        self.position_offset[row] = keeper.position_offset if keeper else 0
        return given

    def rollback(self, row: int, num_computed_tokens: int) -> None:
        """Everything from position `computed` on was only tried."""
        self.evictors[row].rollback(num_computed_tokens)

    def reject(self, slots: Tensor) -> None:
        """Fresh tokens in these slots were only guesses: they are holes."""
        self.kv.pos.view(-1)[slots.long()] = -1

    def positions(self, row: int) -> list[list[list[int]]]:
        """Those in the slots of every layer and head, [L][G], in order."""
        tables = zip(self.pages[row], self.counts[row], strict=True)
        held = [[self.kv.pos[self.kv.to_index(t[:n])] for t, n in zip(*lg, strict=True)] for lg in tables]
        return [[pos[pos >= 0].sort().values.tolist() for pos in heads] for heads in held]

    def slots_per_layer(self, row: int) -> list[int]:
        """For each layer the slots that one head of the row owns now, at most."""
        return [int(n) for n in self.counts[row].max(axis=1) * self.page_size]

    def num_pages(self, row: int) -> int:
        """Pages that the row owns now, of all layers and heads."""
        return len(self._page_list([row]))

    def close(self, row: int) -> list[int]:
        """Give every page of the row back, and the row. Returns for each layer the most slots that one head owned."""
        if self.prefix_cache:
            self.prefix_cache.cancel_load(row)
        self.pool.free(self._page_list([row]))
        if keeper := self.evictors.pop(row, None):  # after its other pages were given
            self.evicted_slots[policies.name_of(keeper.policy)] += keeper.num_evicted
        self.counts[row] = 0
        self.free_row_ids.append(row)
        return [int(n) for n in self.peak_counts[row].max(axis=1) * self.page_size]

    # ---- what people and the accountant read ---------------------------------------------------------------------

    def check(self) -> None:
        """The accountant: every page is free, or in the tables of open rows or of the tree. Raises AssertionError."""
        held = self._page_list(set(range(len(self.allocated_upto))) - set(self.free_row_ids))
        self.pool.check(np.concatenate([held, self.prefix_cache.tree.all_pages]) if self.prefix_cache else held)

    def _page_list(self, rows: Sequence[int] | set[int]) -> Ints:
        r = np.array(sorted(rows), np.int64)
        owned = np.arange(self.pages.shape[3]) < self.counts[r][..., None]
        besides = [k.extra_pages() for row, k in self.evictors.items() if row in rows]
        held: Ints = np.concatenate([self.pages[r][owned], *besides])
        return held
