"""The eviction state of one row: when its policy evicts, and the holes that its next tokens fill.

`evict_rows` evicts from all rows that are due after a step, together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.transfers import to_device
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import EvictorState, Resumption
from retain.kv.eviction.demoter import Demoter
from retain.kv.eviction.operations import RowTables, compact, gather_slots, punch
from retain.kv.eviction.plan import RowPlan
from retain.kv.eviction.shared_pages import SharedPages
from retain.kv.eviction.slot_scores import SlotScores
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints

# (evictors, their computed tokens, what is due)
Operation = Callable[[Sequence["BudgetEvictor"], Sequence[int], Sequence[Any]], None]
MAX_LISTED_HOLES = 512  # of each head at a time, for a prompt that goes on: DeviceTables has them for every row


@dataclass(frozen=True)
class Punch:
    """A due operation: turn the `num_holes` lowest of the first `slots_used` [M, G] slots of each head into holes."""

    num_holes: int
    slots_used: Ints


@dataclass(frozen=True)
class Compact:
    """A due operation: keep `head_budgets` [M, G] tokens of each head, or as many as the policy says, then holes."""

    num_holes: int
    head_budgets: Tensor | None = None


class BudgetEvictor:
    """Evict from the unwindowed layers [M] of one row as a resolved policy says. They have slots of one size.

    Where it `has_holes`, the token at position `holes_from` + i is written into hole i of each head, which
    DeviceTables has. `pages_after_demotion(plan, length)` returns the most pages of a head, see GroupPlanner.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        tables: BlockTables,
        row: int,
        transform: KeyTransform,
        pages_after_demotion: Callable[[RowPlan, int], int],
    ):
        plan = policy.plan
        self.policy = policy
        self.pages_after_demotion = pages_after_demotion
        self.tables = tables
        self.row = row
        self.layers = tables.full_layers(row)
        self.key_factors = transform.factors_of(tables.layers[self.layers], tables.kv.device)
        shape = len(self.layers), tables.counts.shape[2]
        self.head_budgets: Ints = np.full(shape, policy.budget_tokens, np.int32)  # tokens that each head keeps
        self.next_eviction = plan.next_eviction(0)  # computed tokens at that moment
        self.has_holes = False
        self.has_shrunk = False  # whether the budget was halved
        self.holes_from = 0
        self.num_held = self.head_budgets  # [M, G]: tokens in the slots at `holes_from`
        self.compacts_at = plan.begins_at  # computed tokens when the budget begins
        self._num_dropped = 0  # tokens of all heads that have left the budget, so far
        self._num_inherited = 0  # of these, those that earlier rows of the text have evicted
        self.first_eviction = 0  # of a row that resumes: before it `next_eviction` only lists more holes
        self.resumes_at = 0  # computed tokens that it resumed with, where these are a selection
        self.resumed_tokens: Ints | None = None  # [M, G]: how many of them each head has
        self.slot_scores = SlotScores(tables.store, transform, self.key_factors)
        self.shared = SharedPages(tables, row, self.layers)
        self.demoter = Demoter(policy, tables, row, self.layers, self.key_factors) if plan.demoted_tokens else None
        tables.capacity[row, self.layers] = min(plan.prefill_slots, tables.max_pages * tables.page_size)
        if plan.prompt_len > plan.budget:  # a streamed prompt takes all its slots at once, and reuses them
            tables.headroom[row, self.layers] = UNBOUNDED if plan.is_streamed else plan.interval
        tables.mark_dirty(row, dense=False)

    @property
    def scratch_pages(self) -> Ints:
        """Pages that the row holds beside its tables."""
        return np.concatenate([self.shared.spare, self.demoter.spare]) if self.demoter else self.shared.spare

    @property
    def num_evicted(self) -> int:
        """Slots of all heads that were evicted so far. Where tokens are demoted, the host waits for the device."""
        return self._num_dropped - self._num_inherited - (self.demoter.num_tokens if self.demoter else 0)

    def begin_reserve(self) -> None:
        """Free the pages for demoted tokens until they are reserved again: a scoring pass of the prompt comes first."""
        if self.demoter:
            self.demoter.release()

    def finish_reserve(self, end_position: int) -> bool:
        """Own the pages that an eviction at `end_position` computed tokens takes. False if there are too few.

        These are for tokens that are demoted, and in place of pages that others hold, too.
        """
        if (num_places := self.num_places_written(end_position)) and not self.shared.reserve(num_places):
            return False
        if self.demoter and self.demotes_by(end_position):
            num_pages = self.head_budgets.size * self.pages_after_demotion(self.policy.plan, end_position)
            return self.demoter.reserve(end_position, num_pages)
        return True

    def num_places_written(self, num_computed_tokens: int) -> int:
        """Return how many pages of each head, the first ones, the first eviction writes into; 0 where none is due."""
        plan = self.policy.plan
        end = self.next_eviction
        if num_computed_tokens < end or self.has_holes:
            return 0
        if end >= plan.prompt_len and (end < self.compacts_at or end <= plan.budget):
            return 0
        return self._num_places_kept if end == self.compacts_at else self.tables.pages.shape[3]

    @property
    def _num_places_kept(self) -> int:
        """How many pages of each head a compaction may write into."""
        plan = self.policy.plan
        if plan.is_ragged or plan.is_streamed or self.demoter:
            return self.tables.pages.shape[3]
        return -(-plan.decode_slots // self.tables.page_size)

    def reserve_all(self, num_computed_tokens: int) -> bool:
        """Own pages in place of all those that the eviction at so many tokens writes into. False if there are too few.

        Then others may hold the row's pages.
        """
        return self.shared.reserve_all(self.num_places_written(num_computed_tokens))

    def demotes_by(self, num_computed_tokens: int) -> bool:
        """Return whether tokens are demoted when so many are computed."""
        return num_computed_tokens >= self.next_eviction and self.policy.plan.demoted_slots(num_computed_tokens) > 0

    def find_due(self, num_computed_tokens: int) -> list[Punch | Compact] | None:
        """Return what to do now that `next_eviction` is reached, in this order; None where no budget has begun.

        At the end of the prompt, or so many tokens later as the policy waits, the budget begins: what stays is
        compacted, and the layers never grow again. Later the slots of the interval fill up and are emptied.
        """
        plan = self.policy.plan
        if num_computed_tokens < self.first_eviction:
            self._list_holes(num_computed_tokens)
            return None
        self.next_eviction = plan.next_eviction(num_computed_tokens)
        if num_computed_tokens < plan.prompt_len:
            return [self._plan_chunk()]
        if num_computed_tokens < self.compacts_at:  # score slots before queries of the answer add mass
            pages = self.tables.on_device.gather([self.row], self.layers, self.num_table_pages)[0]
            self.slot_scores.update(self.policy, pages, num_computed_tokens - 1)
            return None
        if num_computed_tokens > self.compacts_at:
            return [Punch(plan.interval, self.head_budgets + np.int32(plan.interval))]
        if num_computed_tokens <= plan.budget:
            return []
        # Fresh tokens go into holes from now on: holes replace the slots that the ring's formula gives.
        self.tables.capacity[self.row, self.layers] = 1
        if self.demoter and self.resumed_tokens is not None:
            return self._plan_resumed_demotion(num_computed_tokens)
        # The last chunk of a streamed prompt is demoted as the others were.
        last_chunk = [self._plan_chunk()] if plan.is_streamed and self.demoter else []
        return [*last_chunk, Compact(plan.interval)]

    def _plan_chunk(self) -> Punch:
        """Return the eviction of all tokens over the budget, behind a chunk of a streamed prompt."""
        owned = self.tables.counts[self.row, self.layers] * np.int32(self.tables.page_size)
        return Punch(int(owned.min()) - self.policy.budget_tokens, owned)

    def _plan_resumed_demotion(self, num_computed_tokens: int) -> list[Punch | Compact]:
        """Return the eviction behind the prompt of a row that has demoted tokens before: heads keep their shares."""
        assert self.demoter
        budgets = self.demoter.head_budgets
        if self.policy.plan.is_streamed:
            return [self._plan_chunk(), Compact(self.policy.interval, budgets)]
        assert self.resumed_tokens is not None
        filled = self.resumed_tokens + np.int32(num_computed_tokens - self.resumes_at)  # the first slots of each head
        num_leaving = int((filled - budgets.numpy()).max())
        punches: list[Punch | Compact] = [Punch(num_leaving, filled)] if num_leaving else []
        return [*punches, Compact(self.policy.interval, budgets)]

    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the budget, where the policy allows it. Returns whether pages were freed."""
        smaller = self.policy.halved()
        counts = self.tables.counts[self.row]
        if smaller is None or not self.has_holes or num_computed_tokens < self.policy.prompt_len:
            return False
        before = int(counts.sum())
        protected = smaller.sinks + smaller.recent.resolve(smaller.budget_tokens)
        budgets = torch.from_numpy(self.head_budgets).long() * smaller.budget_tokens // self.policy.budget_tokens
        self.policy = smaller
        self.has_shrunk = True
        compact_rows([self], [num_computed_tokens], [Compact(smaller.interval, budgets.clamp(min=protected))])
        self.next_eviction = num_computed_tokens + smaller.interval
        self.count_evicted(num_computed_tokens)
        return int(counts.sum()) < before

    @property
    def num_table_pages(self) -> int:
        """Pages of the largest head in these layers."""
        return int(self.tables.counts[self.row, self.layers].max())

    def start_holes(self, position: int) -> None:
        """Let the next tokens fill the holes that DeviceTables has, from this position on."""
        self.has_holes = True
        self.holes_from = position
        self.num_held = self.head_budgets

    # ---- resuming ------------------------------------------------------------------------------------------------

    def capture_state(self, num_computed_tokens: int) -> EvictorState:
        """Return the state of the layers after so many tokens, with the row's own pages. No budget is full then."""
        t = self.tables
        counts = t.counts[self.row, self.layers]
        num_tokens = np.full_like(counts, num_computed_tokens)
        if self.has_holes:
            num_tokens = self.num_held + np.int32(num_computed_tokens - self.holes_from)
        else:
            counts = np.minimum(counts, -(-num_tokens // t.page_size))
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
            return torch.zeros(*self.head_budgets.shape, 0, dtype=torch.long, device=t.kv.device)
        begin = position - self.holes_from
        end = self.next_eviction - self.holes_from
        if position < self.policy.prompt_len:  # a longer prompt fills a whole chunk
            end = max(end, begin + self.policy.plan.chunk)
        slots = t.on_device.get_holes(self.row, self.layers, begin, end).long()
        pages = t.on_device.gather([self.row], self.layers, self.num_table_pages)[0]  # [M, G, pages]
        is_page = pages[..., None] == (slots // t.page_size)[:, :, None]  # [M, G, pages, n]
        return is_page.byte().argmax(2) * t.page_size + slots % t.page_size

    def resume(self, state: EvictorState, plan: Resumption, slots: Ints) -> None:
        """Go on from a state whose pages are the row's: the next tokens fill `slots` [M, G] of each head.

        The pool has the pages that they lack.
        """
        t = self.tables
        self.next_eviction = plan.first_eviction
        self.slot_scores.set_state(state.scores)
        if state.is_dense:
            return
        counts = t.counts[self.row, self.layers].copy()
        wanted = np.maximum(-(-slots // t.page_size), counts)
        places = np.arange(int(wanted.max()))
        new = (places >= counts[..., None]) & (places < wanted[..., None])
        tables = t.pages[self.row, self.layers, :, : len(places)]
        tables[new] = np.sort(t.store.allocate(int(new.sum())))
        t.pages[self.row, self.layers, :, : len(places)] = tables
        t.counts[self.row, self.layers] = wanted
        t.peaks[self.row] = np.maximum(t.peaks[self.row], t.counts[self.row])
        t.capacity[self.row, self.layers] = 1  # holes replace the slots that the ring's formula gives
        t.mark_dirty(self.row)
        self.first_eviction = plan.first_eviction
        if plan.position < self.policy.prompt_len:
            self.resumes_at = plan.position
            self.resumed_tokens = state.num_tokens
        else:
            self.head_budgets = state.head_budgets
        if self.demoter and state.demoter:
            self.demoter.resume(state.demoter, plan.previous)
        self._num_dropped = plan.position * state.num_tokens.size - int(state.num_tokens.sum())
        self._num_inherited = self.num_evicted
        self.holes_from = plan.position
        self.num_held = state.num_tokens
        if plan.previous.prompt_len <= plan.position < self.policy.prompt_len:
            self._list_holes(plan.position)
        else:  # the same answer or prompt goes on: it fills the same holes, for sums depend on the order of slots
            self._set_holes(state.hole_places, plan.position)

    def _list_holes(self, position: int) -> None:
        """Let the next tokens fill the first holes of each head."""
        t = self.tables
        n = min(self.first_eviction - position, MAX_LISTED_HOLES)
        pages = t.on_device.gather([self.row], self.layers, self.num_table_pages)[0]  # [M, G, pages]
        is_used = t.kv.pos[pages].flatten(2) >= 0  # [M, G, S]
        owned = torch.from_numpy(t.counts[self.row, self.layers]).to(t.kv.device) * t.page_size
        is_used |= torch.arange(is_used.shape[-1], device=t.kv.device) >= owned[..., None]
        self._set_holes(is_used.byte().argsort(dim=-1, stable=True)[..., :n], position)
        self.next_eviction = position + n

    def _set_holes(self, places: Tensor, position: int) -> None:
        """Let the tokens from this position on fill the slots at these places [M, G, n]."""
        t = self.tables
        pages = t.on_device.gather([self.row], self.layers, self.num_table_pages)[0]
        t.on_device.set_holes([self.row], self.layers, gather_slots(pages, places, t.page_size)[None])
        num_held = self.num_held + np.int32(position - self.holes_from)
        self.start_holes(position)
        self.num_held = num_held

    def replace_shared_pages(self) -> Ints | None:
        """Return the tables that a compaction writes into; None where these are the row's own. See SharedPages."""
        return self.shared.replace(self._num_places_kept)

    def own_shared_pages(self) -> None:
        """Give the row copies of pages that others hold, before holes are punched into them for the first time."""
        if not self.has_holes:
            self.shared.copy()

    # ---- after an eviction ---------------------------------------------------------------------------------------

    def keep(self, head_budgets: Ints, places: Tensor) -> None:
        """Record a compaction: heads keep so many tokens [M, G], which were at these places [M, G, n]."""
        t = self.tables
        self.head_budgets = head_budgets
        counts = -(-(head_budgets + self.policy.interval) // t.page_size)
        over = t.owned(self.row)[self.layers] & (np.arange(t.pages.shape[3]) >= counts[..., None])
        t.pool.free(t.pages[self.row, self.layers][over])
        t.counts[self.row, self.layers] = counts
        t.mark_dirty(self.row)
        self.slot_scores.keep(places[..., : int(head_budgets.max())], int(counts.max()) * t.page_size)

    def count_evicted(self, num_computed_tokens: int) -> None:
        """Count the tokens that have left the budget when so many are computed."""
        kept = int(np.minimum(self.head_budgets, num_computed_tokens).sum())
        self._num_dropped = num_computed_tokens * self.head_budgets.size - kept


def operation_of(evictor: BudgetEvictor, due: Punch | Compact) -> Operation:
    """Return the function that does what is due."""
    if isinstance(due, Compact):
        return compact_rows
    return punch_ranked_rows if evictor.policy.ranked_by and not evictor.demoter else punch_rows


def evict_rows(evictors: Sequence[BudgetEvictor], num_computed_tokens: Sequence[int]) -> None:
    """Evict from rows of one cache, because the `next_eviction` of each is reached.

    Those that do the same, and punch or leave equally many holes, are evicted by one call.
    """
    plans = [evictor.find_due(n) for evictor, n in zip(evictors, num_computed_tokens, strict=True)]
    for step in range(max((len(plan or ()) for plan in plans), default=0)):
        groups: dict[tuple[Operation, int], list[int]] = {}
        for i, plan in enumerate(plans):
            if plan and step < len(plan):
                operation = operation_of(evictors[i], plan[step])
                groups.setdefault((operation, plan[step].num_holes), []).append(i)
        for (operation, _), members in groups.items():
            group = [evictors[i] for i in members]
            computed = [num_computed_tokens[i] for i in members]
            operation(group, computed, [plan[step] for i in members if (plan := plans[i])])
    for evictor, n, plan in zip(evictors, num_computed_tokens, plans, strict=True):
        if plan is not None:
            evictor.count_evicted(n)


def punch_ranked_rows(
    evictors: Sequence[BudgetEvictor], num_computed_tokens: Sequence[int], due: Sequence[Punch]
) -> None:
    """Punch equally many holes into the tables of rows, where the backend can rank slots by itself."""
    first = evictors[0]
    assert all(np.array_equal(e.layers, first.layers) for e in evictors)
    for evictor in evictors:
        evictor.own_shared_pages()
    tables = first.tables
    lists = tables.on_device.eviction_lists(
        [e.row for e in evictors],
        first.layers,
        np.stack([d.slots_used for d in due]),
        [e.policy.evictable_range(n - 1) for e, n in zip(evictors, num_computed_tokens, strict=True)],
        [e.policy.ranked_by == "mass" for e in evictors],
    )
    n = due[0].num_holes
    tables.on_device.reserve_holes(n)
    tables.store.backend.punch(tables.kv, lists, tables.on_device.holes, n)
    for evictor, position in zip(evictors, num_computed_tokens, strict=True):
        evictor.start_holes(position)


def punch_rows(evictors: Sequence[BudgetEvictor], num_computed_tokens: Sequence[int], due: Sequence[Punch]) -> None:
    """Punch equally many holes into the tables of rows, and demote what was in them."""
    first = evictors[0]
    for evictor in evictors:
        evictor.own_shared_pages()
    tables = gather_row_tables(evictors, num_computed_tokens)
    victims = punch(tables, np.stack([d.slots_used for d in due]), due[0].num_holes)
    for b, (evictor, n) in enumerate(zip(evictors, num_computed_tokens, strict=True)):
        if evictor.demoter:
            evictor.demoter.add(victims.of_row(b), n - 1, tables.slot_scores[b])
        evictor.start_holes(n)
    first.tables.on_device.set_holes([e.row for e in evictors], first.layers, victims.slots)


def compact_rows(evictors: Sequence[BudgetEvictor], num_computed_tokens: Sequence[int], due: Sequence[Compact]) -> None:
    """Keep the highest slots of rows, give pages back, and demote what ranks next."""
    first = evictors[0]
    tables = gather_row_tables(evictors, num_computed_tokens)
    demoted = [
        e.demoter.take(tables.pages_of(b), tables.query_positions[b], tables.slot_scores[b])
        if e.demoter and not e.demoter.has_begun
        else None
        for b, e in enumerate(evictors)
    ]
    own_pages = [e.replace_shared_pages() for e in evictors]
    done = compact(tables, [d.head_budgets for d in due], due[0].num_holes, _join_tables(tables, own_pages))
    for b, (evictor, n) in enumerate(zip(evictors, num_computed_tokens, strict=True)):
        evictor.shared.put(own_pages[b])
        evictor.keep(done.head_budgets[b], done.places[b])
        if evictor.demoter and (taken := demoted[b]):
            evictor.demoter.begin(*taken, n)
        evictor.start_holes(n)
    first.tables.on_device.set_holes([e.row for e in evictors], first.layers, done.holes)


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


def gather_row_tables(evictors: Sequence[BudgetEvictor], num_computed_tokens: Sequence[int]) -> RowTables:
    """Return the tables of rows that evict together, and score the slots that are new."""
    first = evictors[0]
    # Budgets do not change the windows of layers, so all rows evict in the same ones.
    assert all(np.array_equal(e.layers, first.layers) for e in evictors)
    widths = [e.num_table_pages for e in evictors]
    pages = first.tables.on_device.gather([e.row for e in evictors], first.layers, max(widths))
    last = [n - 1 for n in num_computed_tokens]
    scores = [e.slot_scores.update(e.policy, pages[b, :, :, : widths[b]], last[b]) for b, e in enumerate(evictors)]
    return RowTables(first.tables.store, pages, widths, [e.policy for e in evictors], last, scores, first.key_factors)
