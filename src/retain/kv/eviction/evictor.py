"""The evictions of one row: when its policy evicts, and the holes that its next tokens fill.

`evict_rows` evicts from all rows that are due after a step, together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.transfers import to_device
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import EvictorState, Resumption
from retain.kv.eviction.demoter import Demoter
from retain.kv.eviction.operations import EvictingRow, RowTables, compact, gather_slots, punch, write_values
from retain.kv.eviction.query_blocks import QueryBlocks
from retain.kv.eviction.shared_pages import SharedPages
from retain.kv.eviction.slot_scores import SlotScores
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints

MAX_LISTED_HOLES = 512  # of each head at a time, for a prompt that goes on: DeviceTables has them for every row


@dataclass(frozen=True)
class Due:
    """An eviction from one row when `position` tokens are computed. The next ones fill `num_holes` of each head."""

    evictor: BudgetEvictor
    position: int
    num_holes: int


@dataclass(frozen=True)
class Punch(Due):
    """Turn the `num_holes` lowest of the first `slots_used` [M, G] slots of each head into holes."""

    slots_used: Ints


@dataclass(frozen=True)
class Compact(Due):
    """Keep `head_budgets` [M, G] tokens of each head, or as many as the policy says; the holes are behind them."""

    head_budgets: Tensor | None = None


class BudgetEvictor:
    """Evict from the unwindowed layers [M] of one row as a resolved policy says. They have slots of one size.

    Where it `has_holes`, the token at position `holes_from` + i is written into hole i of each head, which
    DeviceTables has.
    """

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, row: int, transform: KeyTransform):
        plan = policy.plan
        self.policy = policy
        self.tables = tables
        self.row = row
        self.layers = tables.full_layers(row)
        key_factors = transform.factors_of(tables.layers[self.layers], tables.kv.device)
        shape = len(self.layers), policy.kv_heads.num_of_all(tables.counts.shape[2])
        self.head_budgets: Ints = np.full(shape, policy.budget_tokens, np.int32)  # tokens that heads of all ranks keep
        self.next_eviction = plan.next_eviction(0)  # computed tokens at that moment
        self.has_holes = False
        self.has_shrunk = False  # whether the budget was halved
        self.holes_from = 0
        self.num_held = self.head_budgets  # [M, heads of all ranks]: tokens in the slots at `holes_from`
        self.num_inherited = 0  # tokens of all heads that earlier rows of the text have evicted
        self.first_eviction = 0  # of a row that resumes: before it `next_eviction` only lists more holes
        self.slot_scores = SlotScores(tables.store, transform, key_factors)
        self.query_blocks = QueryBlocks(policy, tables, self.layers, transform)
        self.shared = SharedPages(tables, row, self.layers)
        self.demoter = Demoter(policy, tables, row, self.layers, key_factors) if plan.demoted_tokens else None
        tables.capacity[row, self.layers] = min(plan.prefill_slots, tables.max_pages * tables.page_size)
        if plan.prompt_len > plan.budget:  # a streamed prompt takes all its slots at once, and reuses them
            tables.headroom[row, self.layers] = UNBOUNDED if plan.is_streamed else plan.interval
        tables.mark_dirty(row, dense=False)

    @property
    def compacts_at(self) -> int:
        """Computed tokens when the budget begins."""
        return self.policy.plan.begins_at

    @property
    def scratch_pages(self) -> Ints:
        """Pages that the row holds beside its tables."""
        spare = self.shared.spare.pages
        return np.concatenate([spare, self.demoter.spare.pages]) if self.demoter else spare

    @property
    def num_evicted(self) -> int:
        """Slots of all heads that were evicted so far. Where tokens are demoted, the host waits for the device."""
        dropped = int(self._own(self.num_dropped).sum())
        return dropped - self.num_inherited - (self.demoter.num_tokens if self.demoter else 0)

    @property
    def num_dropped(self) -> Ints:
        """Tokens that each head of all ranks has no more in its own slots [M, heads]: evicted, or demoted."""
        return self.holes_from - self.num_held if self.has_holes else np.zeros_like(self.num_held)

    def begin_reserve(self) -> None:
        """Free the pages for demoted tokens until they are reserved again: a scoring pass of the prompt comes first."""
        if self.demoter:
            self.demoter.spare.release()

    def finish_reserve(self, end_position: int) -> bool:
        """Reserve the pages that the eviction at `end_position` computed tokens writes. False if there are too few.

        These are for tokens that are demoted, and in place of pages that others hold, too.
        """
        if (num_pages := self.num_pages_written(end_position)) and not self.shared.reserve(num_pages):
            return False
        demotes = self.demoter and end_position >= self.next_eviction and self.policy.plan.demoted_slots(end_position)
        return not self.demoter or not demotes or self.demoter.reserve(end_position)

    def num_pages_written(self, num_computed_tokens: int) -> int:
        """Return how many pages of each head, the first ones, the first eviction writes into; 0 where none is due."""
        plan = self.policy.plan
        end = self.next_eviction
        if num_computed_tokens < end or self.has_holes:
            return 0
        if end >= plan.prompt_len and (end < self.compacts_at or end <= plan.budget):
            return 0
        return self.num_pages_kept if end == self.compacts_at else self.tables.pages.shape[3]

    @property
    def num_pages_kept(self) -> int:
        """How many pages of each head a compaction may write into, the first ones."""
        plan = self.policy.plan
        if plan.is_ragged or plan.is_streamed or self.demoter:
            return self.tables.pages.shape[3]
        return -(-plan.decode_slots // self.tables.page_size)

    def reserve_all(self, num_computed_tokens: int) -> bool:
        """Own pages in place of all those that the eviction at so many tokens writes into. False if there are too few.

        Then others may hold the row's pages.
        """
        return self.shared.reserve_all(self.num_pages_written(num_computed_tokens))

    def score_queries(self, num_computed_tokens: int) -> None:
        """Let the policy score the queries of a block of the prompt, where one ends at so many computed tokens."""
        if self.query_blocks.next_end == num_computed_tokens:
            self.query_blocks.score(self._gather_pages(), self.slot_scores.key_factors)

    def find_due(self, num_computed_tokens: int) -> list[Punch | Compact]:
        """Return what to do now that `next_eviction` is reached, in this order.

        At the end of the prompt, or so many tokens later as the policy waits, the budget begins: what stays is
        compacted, and the layers never grow again. Later the slots of the interval fill up and are emptied.
        """
        plan = self.policy.plan
        n = num_computed_tokens
        if n < self.first_eviction:
            self._list_holes(n)
            return []
        self.next_eviction = plan.next_eviction(n)
        if n < plan.prompt_len:
            return [self._plan_chunk(n)]
        if n < self.compacts_at:  # score slots before queries of the answer add mass
            self.slot_scores.update(self.policy, self._gather_pages(), n - 1)
            return []
        if n > self.compacts_at:
            return [Punch(self, n, plan.interval, self._own(self.head_budgets) + np.int32(plan.interval))]
        if n <= plan.budget:
            if self.policy.query_blocks:  # its scores are of the prompt alone, as above
                self.slot_scores.update(self.policy, self._gather_pages(), n - 1)
            return []
        # Fresh tokens go into holes from now on: holes replace the slots that the ring's formula gives.
        self.tables.capacity[self.row, self.layers] = 1
        if self.demoter and self.demoter.has_begun:
            return self._plan_late_demotion(self.demoter, n)
        return [Compact(self, n, plan.interval)]

    def _plan_chunk(self, position: int) -> Punch:
        """Return the eviction of all tokens over the budget, behind a chunk of a streamed prompt."""
        owned = self.tables.counts[self.row, self.layers] * np.int32(self.tables.page_size)
        return Punch(self, position, int(owned.min()) - self.policy.budget_tokens, owned)

    def _plan_late_demotion(self, demoter: Demoter, position: int) -> list[Punch | Compact]:
        """Return the eviction behind the prompt of a row that has demoted tokens before: heads keep their shares.

        The last tokens of the prompt are demoted as those before them were.
        """
        compaction = Compact(self, position, self.policy.interval, self.policy.kv_heads.select(demoter.head_budgets))
        if self.policy.plan.is_streamed:
            return [self._plan_chunk(position), compaction]
        filled = self._num_held_at(position)  # the first slots of each head
        num_leaving = int((filled - demoter.head_budgets.numpy()).max())
        return [Punch(self, position, num_leaving, self._own(filled)), compaction] if num_leaving else [compaction]

    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the budget, where the policy allows it. Returns whether pages were freed."""
        smaller = self.policy.halved()
        counts = self.tables.counts[self.row]
        if smaller is None or not self.has_holes or num_computed_tokens < self.policy.prompt_len:
            return False
        before = int(counts.sum())
        protected = smaller.sinks + smaller.recent_tokens
        budgets = (
            torch.from_numpy(self._own(self.head_budgets)).long() * smaller.budget_tokens // self.policy.budget_tokens
        )
        self.policy = smaller
        self.has_shrunk = True
        compact_rows([Compact(self, num_computed_tokens, smaller.interval, budgets.clamp(min=protected))])
        self.next_eviction = num_computed_tokens + smaller.interval
        return int(counts.sum()) < before

    @property
    def num_table_pages(self) -> int:
        """Pages of the largest head in these layers."""
        return int(self.tables.counts[self.row, self.layers].max())

    def _gather_pages(self) -> Tensor:
        """Return the tables of these layers on the device, int64 [M, G, pages]."""
        return self.tables.on_device.rows.gather_pages([self.row], self.layers, self.num_table_pages)[0]

    def start_holes(self, position: int, num_held: Ints) -> None:
        """Let the tokens from a position on fill the holes in DeviceTables. `num_held`: tokens that heads hold then."""
        self.has_holes = True
        self.holes_from = position
        self.num_held = num_held

    def _num_held_at(self, position: int) -> Ints:
        """Return the tokens in the slots of heads of all ranks when so many are computed."""
        return self.num_held + np.int32(position - self.holes_from)

    def _own(self, numbers: Ints) -> Ints:
        """Return those [M, G] of this rank's heads."""
        return self.policy.kv_heads.select(numbers)

    # ---- resuming ------------------------------------------------------------------------------------------------

    def capture_state(self, num_computed_tokens: int) -> EvictorState:
        """Return the state of the layers after so many tokens, with the row's own pages. No budget is full then."""
        t = self.tables
        counts = t.counts[self.row, self.layers]
        num_tokens = np.full_like(self.head_budgets, num_computed_tokens)
        if self.has_holes:
            num_tokens = self._num_held_at(num_computed_tokens)
        else:
            counts = np.minimum(counts, -(-num_computed_tokens // t.page_size))
        return EvictorState(
            pages=t.pages[self.row, self.layers, :, : int(counts.max())],
            counts=counts,
            num_tokens=num_tokens,
            head_budgets=self.head_budgets,
            is_dense=not self.has_holes,
            next_eviction=self.next_eviction,
            hole_places=self._hole_places(num_computed_tokens),
            scores=self.slot_scores.get_state(),
            demoter=self.demoter.capture_state() if self.demoter and self.has_holes else None,
        )

    def _hole_places(self, position: int) -> Tensor:
        """Return the places of the holes that tokens from this position on would fill, int64 [M, G, n]."""
        t = self.tables
        if not self.has_holes:
            return torch.zeros(*self._own(self.head_budgets).shape, 0, dtype=torch.long, device=t.kv.device)
        begin = position - self.holes_from
        end = self.next_eviction - self.holes_from
        if position < self.policy.prompt_len:  # a longer prompt fills a whole chunk
            end = max(end, begin + self.policy.plan.chunk)
        slots = t.on_device.get_holes(self.row, self.layers, begin, end).long()
        is_page = self._gather_pages()[..., None] == (slots // t.page_size)[:, :, None]  # [M, G, pages, n]
        return is_page.byte().argmax(2) * t.page_size + slots % t.page_size

    def resume(self, state: EvictorState, plan: Resumption, slots: Ints) -> None:
        """Go on from a state whose pages are the row's: the next tokens fill `slots` of each head of all ranks.

        The pool has the pages that they lack.
        """
        t = self.tables
        self.next_eviction = plan.first_eviction
        self.slot_scores.set_state(state.scores)
        if state.is_dense:
            return
        wanted = t.counts[self.row].copy()
        slots = self.policy.kv_heads.largest(slots)
        wanted[self.layers] = np.maximum(-(-slots // t.page_size), wanted[self.layers])
        t.grow(self.row, wanted)
        t.capacity[self.row, self.layers] = 1  # holes replace the slots that the ring's formula gives
        t.mark_dirty(self.row)
        self.first_eviction = plan.first_eviction
        if plan.position >= self.policy.prompt_len:
            self.head_budgets = state.head_budgets
        if self.demoter and state.demoter:
            self.demoter.resume(state.demoter, plan.previous)
        self.holes_from = plan.position
        self.num_held = state.num_tokens
        if plan.previous.prompt_len <= plan.position < self.policy.prompt_len:
            self._list_holes(plan.position)
        else:  # the same answer or prompt goes on: it fills the same holes, for sums depend on the order of slots
            self._set_holes(state.hole_places, plan.position)
        self.num_inherited = self.num_evicted

    def _list_holes(self, position: int) -> None:
        """Let the next tokens fill the first holes of each head."""
        t = self.tables
        n = min(self.first_eviction - position, MAX_LISTED_HOLES)
        is_used = t.kv.pos[self._gather_pages()].flatten(2) >= 0  # [M, G, S]
        owned = torch.from_numpy(t.counts[self.row, self.layers]).to(t.kv.device) * t.page_size
        is_used |= torch.arange(is_used.shape[-1], device=t.kv.device) >= owned[..., None]
        self._set_holes(is_used.byte().argsort(dim=-1, stable=True)[..., :n], position)
        self.next_eviction = position + n

    def _set_holes(self, places: Tensor, position: int) -> None:
        """Let the tokens from this position on fill the slots at these places [M, G, n]."""
        slots = gather_slots(self._gather_pages(), places, self.tables.page_size)
        self.tables.on_device.set_holes([self.row], self.layers, slots[None])
        self.start_holes(position, self._num_held_at(position))

    def own_shared_pages(self) -> None:
        """Give the row copies of pages that others hold, before holes are punched into them for the first time."""
        if not self.has_holes:
            self.shared.copy()

    # ---- after an eviction ---------------------------------------------------------------------------------------

    def keep(self, head_budgets: Ints, places: Tensor) -> None:
        """Update the row's tables after its kept tokens were moved together, and free the pages that are left over.

        Heads keep `head_budgets` tokens [M, G], which were at `places` [M, G, n]. The tables of all ranks are as large.
        """
        t = self.tables
        self.head_budgets = self.policy.budgets_of_all(torch.from_numpy(head_budgets)).numpy()
        counts = -(-(self.policy.kv_heads.largest(self.head_budgets) + self.policy.interval) // t.page_size)
        over = t.owned(self.row)[self.layers] & (np.arange(t.pages.shape[3]) >= counts[..., None])
        t.pool.free(t.pages[self.row, self.layers][over])
        t.counts[self.row, self.layers] = counts
        t.mark_dirty(self.row)
        self.slot_scores.keep(places[..., : int(head_budgets.max())], int(counts.max()) * t.page_size)

    def fit_values(self, pages: Tensor, kept: Tensor, is_used: Tensor, position: int) -> list[Tensor]:
        """Return new values [G, n, V] of slots `kept` [M, G, n] in tables [M, G, pages], layer by layer."""
        # Sums are over the pages of the tokens so far: how many more the row owns depends on its history.
        pages = pages[..., : -(-(position + 1) // self.tables.page_size)]
        return self.query_blocks.fit_values(pages, kept, is_used, position, self.slot_scores.key_factors)

    def score_new_slots(self, pages: Tensor, position: int) -> EvictingRow:
        """Score the slots that are new in tables [M, G, n], and return what ranks all of them."""
        n = self.num_table_pages
        scores = self.slot_scores.update(self.policy, pages[..., :n], position - 1)
        return EvictingRow(self.policy, position - 1, n, scores)


def operation_of(due: Punch | Compact) -> Callable[[Sequence[Any]], None]:
    """Return the function that does what is due, of many rows."""
    if isinstance(due, Compact):
        return compact_rows
    return punch_ranked_rows if due.evictor.policy.ranked_by and not due.evictor.demoter else punch_rows


def evict_rows(evictors: Iterable[tuple[BudgetEvictor, int]]) -> None:
    """Evict from rows of one cache, because the `next_eviction` of each is reached by its computed tokens.

    Those that do the same, and punch or leave equally many holes, are evicted by one call. Budgets do not change the
    windows of layers, so all rows evict in the same ones.
    """
    plans = [evictor.find_due(num_computed_tokens) for evictor, num_computed_tokens in evictors]
    for step in zip_longest(*plans):
        alike: dict[tuple[Callable[[Sequence[Any]], None], int], list[Due]] = {}
        for due in filter(None, step):
            alike.setdefault((operation_of(due), due.num_holes), []).append(due)
        for (operation, _), rows in alike.items():
            assert all(np.array_equal(due.evictor.layers, rows[0].evictor.layers) for due in rows)
            operation(rows)


def punch_ranked_rows(due: Sequence[Punch]) -> None:
    """Evict equally many tokens from each row on the device, where the backend ranks the slots by itself."""
    evictors = [d.evictor for d in due]
    for evictor in evictors:
        evictor.own_shared_pages()
    tables = evictors[0].tables
    lists = tables.on_device.eviction_lists(
        [e.row for e in evictors],
        evictors[0].layers,
        np.stack([d.slots_used for d in due]),
        [d.evictor.policy.evictable_range(d.position - 1) for d in due],
        [e.policy.ranked_by == "mass" for e in evictors],
    )
    n = due[0].num_holes
    tables.on_device.reserve_holes(n)
    tables.store.backend.punch(tables.kv, lists, tables.on_device.holes, n)
    for d in due:
        d.evictor.start_holes(d.position, d.evictor.head_budgets)


def punch_rows(due: Sequence[Punch]) -> None:
    """Punch equally many holes into the tables of rows, and demote what was in them."""
    for d in due:
        d.evictor.own_shared_pages()
    tables = gather_row_tables(due)
    victims = punch(tables, np.stack([d.slots_used for d in due]), due[0].num_holes)
    for b, d in enumerate(due):
        if d.evictor.demoter:
            d.evictor.demoter.add(victims.of_row(b), tables.rows[b])
    start_holes(due, victims.slots)


def compact_rows(due: Sequence[Compact]) -> None:
    """Keep the highest slots of rows, give pages back, and demote what ranks next."""
    tables = gather_row_tables(due)
    demoters = [d.evictor.demoter for d in due]
    demoted = [
        demoter.take(tables.of_row(b)) if demoter and not demoter.has_begun else None
        for b, demoter in enumerate(demoters)
    ]
    own_pages = [d.evictor.shared.replace(d.evictor.num_pages_kept) for d in due]
    refits: dict[int, list[Tensor]] = {}

    def fit_values(places: Tensor, is_used: Tensor) -> None:
        for b, d in enumerate(due):
            is_first = not d.evictor.has_holes  # a budget that shrinks is compacted again
            if is_first and len(d.evictor.policy.plan.refit_positions):
                kept = places[b].clamp(max=d.position - 1)
                refits[b] = d.evictor.fit_values(tables.pages_of(b), kept, is_used[b], d.position - 1)

    new_pages = _join_tables(tables, own_pages)
    done = compact(tables, [d.head_budgets for d in due], due[0].num_holes, new_pages, fit_values)
    for b, values in refits.items():
        write_values(tables.store, (tables.pages if new_pages is None else new_pages)[b], done.head_budgets[b], values)
    for b, d in enumerate(due):
        d.evictor.shared.put(own_pages[b])
        d.evictor.keep(done.head_budgets[b], done.places[b])
        if (demoter := demoters[b]) and (taken := demoted[b]):
            demoter.begin(taken, d.position)
    start_holes(due, done.holes)


def _join_tables(tables: RowTables, pages: Sequence[Ints | None]) -> Tensor | None:
    """Return tables [B, M, G, n] of these pages, and of a row's own where there are none; None for all rows' own."""
    if all(own is None for own in pages):
        return None
    found = [
        tables.pages_of(b) if own is None else to_device(torch.from_numpy(own).long(), tables.pages.device)
        for b, own in enumerate(pages)
    ]
    width = max(own.shape[-1] for own in found)
    return torch.stack([F.pad(own, (0, width - own.shape[-1])) for own in found])


def start_holes(due: Sequence[Due], holes: Tensor) -> None:
    """Let the next tokens of rows fill holes [B, M, G, n], which are slot numbers."""
    first = due[0].evictor
    first.tables.on_device.set_holes([d.evictor.row for d in due], first.layers, holes)
    for d in due:
        d.evictor.start_holes(d.position, d.evictor.head_budgets)


def gather_row_tables(due: Sequence[Due]) -> RowTables:
    """Return the tables of rows that evict together, and score the slots that are new."""
    first = due[0].evictor
    n = max(d.evictor.num_table_pages for d in due)
    pages = first.tables.on_device.rows.gather_pages([d.evictor.row for d in due], first.layers, n)
    rows = [d.evictor.score_new_slots(pages[b], d.position) for b, d in enumerate(due)]
    return RowTables(first.tables.store, pages, rows, first.slot_scores.key_factors)
