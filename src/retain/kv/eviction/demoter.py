"""The demoted tokens of one row: what its budget would forget goes to four bits, and is forgotten from there.

How many tokens of each head move is known on the host, and which on the device only, so the host waits for nothing.
Rows that evict together demote one after another, for each owns other numbers of slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.transfers import to_device
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import DemoterState, used_pages
from retain.kv.eviction.operations import EvictingRow, RowTables, Victims, choose_budgets, rank_slots
from retain.kv.eviction.shared_pages import SparePages
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.types import Ints


@dataclass(frozen=True)
class DemotedSlots:
    """Tokens on their way to four bits: heads, K, V, mass and positions of n slots."""

    head: Tensor  # int64 [n], between 0 and M G
    i: Tensor  # int64 [n]: number of the token in its head
    k: Tensor  # float32 [n, D]
    v: Tensor  # float32 [n, D]
    mass: Tensor  # float32 [n, C]
    pos: Tensor  # int32 [n]; -1 where the slot was a hole
    scores: Tensor | None  # float32 [n]: what the policy keeps for each slot


def number_tokens(counts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the head and the number in it of each token, int64 [n], where heads have `counts` [M, G] on the host."""
    n = to_device(counts.flatten(), device)
    total = int(counts.sum())
    head = torch.arange(len(n), device=device).repeat_interleave(n, output_size=total)
    return head, torch.arange(total, device=device) - (n.cumsum(0) - n)[head]


class Demoter:
    """Demote from the unwindowed layers [M] of one row; each head has tables of its own for that.

    The budget begins with `take`, before slots move, and `begin`, when their pages are free; or with `add`, where a
    streamed prompt or an answer outgrows it. Later tokens come by `add`. Tables grow with the text as far as heads have
    capacity; from then on the lowest of the demoted make room.
    """

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, row: int, layers: Ints, key_factors: Tensor | None):
        assert tables.demoted, "the cache was built without room for demoted tokens"
        self.policy = policy
        self.tables = tables.demoted
        self.row = row
        self.layers = layers
        self.key_factors = key_factors  # [M, G, 1, D]
        self.block_tables = tables
        self.spare = SparePages(self.tables.store)  # that `begin` will need
        # int64 [M, heads of all ranks] on the host: tokens that each head demotes at most, and tokens in its budget;
        # until `begin` those of a budget that begins with `add`
        G = tables.counts.shape[2]
        shape = len(layers), policy.kv_heads.num_of_all(G)
        plan = policy.plan
        self.capacities = torch.full(shape, plan.demoted_tokens)
        self.head_budgets = torch.full(shape, plan.budget)
        self.has_begun = plan.is_streamed or plan.begins_at <= plan.budget
        self.num_left = torch.zeros(shape, dtype=torch.long)  # tokens that have left each head's budget, so far
        # float32 [M, G, S], where the policy scores slots
        self.scores = torch.zeros(len(layers), G, 0, device=tables.kv.device) if policy.scores_slots else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all heads that are demoted now. The host waits for the device."""
        kv = self.tables.store.kv
        return int((kv.pos[kv.to_index(self.tables.page_list(self.row))] >= 0).sum())

    def reserve(self, num_computed_tokens: int) -> bool:
        """Own the pages that an eviction at so many tokens takes, beyond those it frees. False if there are too few."""
        if self.has_begun:
            counts = self._page_counts(num_computed_tokens) - self.tables.counts[self.row, self.layers]
            return self.spare.reserve(int(counts.sum()))
        sizes = self.block_tables.page_size, self.tables.store.page_size
        counts = self.block_tables.counts[self.row, self.layers]
        num_pages = counts.size * self.policy.plan.pages_after_demotion(num_computed_tokens, *sizes)
        return self.spare.reserve(num_pages - int(counts.sum()))

    def capture_state(self) -> DemoterState:
        """Return the demoted tokens, in the row's own pages, and what is known of each head."""
        pages = self.tables.layer_tables(self.row, self.layers)
        counts = self.tables.counts[self.row, self.layers]
        return DemoterState(pages, counts, self.capacities, self.head_budgets, self.num_left, self.scores)

    def resume(self, state: DemoterState, previous: BudgetPolicy) -> None:
        """Go on from a state of a row with the policy `previous`, in copies of its pages. The pool has these.

        A budget that is a share of the prompt has grown, for all heads alike.
        """
        store = self.tables.store
        self.tables.allocate(self.row, self.layers, state.counts)
        store.copy(used_pages(state.pages, state.counts), self.tables.page_list(self.row))
        self.head_budgets = state.head_budgets + self.policy.budget_tokens - previous.budget_tokens
        self.capacities = state.capacities + max(self.policy.plan.demoted_tokens - previous.plan.demoted_tokens, 0)
        self.num_left = state.num_left
        self.has_begun = True
        self.scores = None if state.scores is None else state.scores.clone()

    def take(self, tables: RowTables) -> DemotedSlots:
        """Read the tokens of the row's tables that rank next to those that the budget keeps, and fix both sizes."""
        policy = self.policy
        store = tables.store
        pages = tables.pages[0]
        ranked = rank_slots(tables)
        rank = ranked.keys[0]
        row = tables.rows[0]
        most = policy.budget_tokens + policy.plan.demoted_tokens
        both = min(most, row.query_position + 1)
        view = ranked.views[0]
        kept = choose_budgets(policy, rank, view, policy.budget_tokens).cpu()  # the host waits if heads share
        upto = choose_budgets(policy, rank, view, both).cpu().maximum(kept)
        order = rank.topk(int(upto.max())).indices.flatten(0, 1)
        head, i = number_tokens(upto - kept, order.device)
        places = order[head, to_device(kept.flatten(), order.device)[head] + i]
        self.capacities = policy.budgets_of_all(upto - kept + (most - both))  # room for the answer
        self.head_budgets = policy.budgets_of_all(kept)
        slots = slots_at(store, pages, head, places)
        S = store.page_size
        mass = store.kv.mass.transpose(1, 2)[slots // S, slots % S]
        pos = store.kv.pos.view(-1)[slots]
        scores = None if row.slot_scores is None else row.slot_scores.flatten(0, 1)[head, places]
        return DemotedSlots(head, i, *store.read(slots), mass, pos, scores)

    def begin(self, demoted: DemotedSlots, num_computed_tokens: int) -> None:
        """Own the pages of the demoted tokens, and write them."""
        self.has_begun = True
        self._grow(num_computed_tokens)
        store = self.tables.store
        S = store.page_size
        slots = self._slots(demoted.head, demoted.i, demoted.pos)
        # As one head.
        k = demoted.k[:, None]
        v = demoted.v[:, None]
        store.backend.write(store.kv, slots[None].int(), k, v, demoted.pos)
        store.kv.mass.transpose(1, 2)[slots // S, slots % S] = demoted.mass
        self._write_scores(demoted.head, demoted.i, demoted.pos, demoted.scores)

    def add(self, victims: Victims, row: EvictingRow) -> None:
        """Take the tokens that a budget has just evicted, or as many of them as a head demotes, the highest first."""
        before = self.num_left
        device = victims.pos.device
        self._grow(row.query_position + 1)
        after = self.num_left
        head, i = number_tokens(self.policy.kv_heads.select(torch.minimum(after - before, self.capacities)), device)
        if bool((after <= self.capacities).all()):
            to = to_device(self.policy.kv_heads.select(before).flatten(), device)[head] + i
        else:
            to = self._lowest_places(victims.pos.shape[-1], row.query_position)[head, i]
        slots, pos, places = (x.flip(-1).flatten(0, 1)[head, i] for x in (victims.slots, victims.pos, victims.places))
        kv = self.block_tables.kv
        demoted_kv = self.tables.store.kv
        self.tables.store.backend.requantize(kv, slots.long(), demoted_kv, self._slots(head, to, pos), pos)
        scores = row.slot_scores
        self._write_scores(head, to, pos, None if scores is None else scores.flatten(0, 1)[head, places])

    def _lowest_places(self, n: int, query_position: int) -> Tensor:
        """Return the n places of each head [M G, n] that are free or hold the lowest tokens, in this order."""
        pages = self._pages()
        row = EvictingRow(self.policy, query_position, pages.shape[-1], self.scores)
        key = rank_slots(RowTables(self.tables.store, pages[None], [row], self.key_factors)).keys[0]
        held = to_device(self.policy.kv_heads.select(self._num_demoted(query_position + 1)), key.device)[..., None]
        key.masked_fill_(torch.arange(key.shape[-1], device=key.device) >= held, 2**63 - 1)
        return key.topk(min(n, key.shape[-1]), largest=False).indices.flatten(0, 1)

    def _num_evicted(self, num_computed_tokens: int) -> Tensor:
        """Return the tokens of each head that have left its budget, int64 [M, heads of all ranks] on the host."""
        return (num_computed_tokens - self.head_budgets).clamp(min=0)

    def _num_demoted(self, num_computed_tokens: int) -> Tensor:
        """Return the tokens that each head demotes, int64 [M, heads of all ranks] on the host."""
        return torch.minimum(self._num_evicted(num_computed_tokens), self.capacities)

    def _page_counts(self, num_computed_tokens: int) -> Ints:
        """Return the pages of demoted tokens of each head, [M, G]; on all ranks as many."""
        pages = -(-self._num_demoted(num_computed_tokens) // self.tables.store.page_size)
        return self.policy.kv_heads.largest(pages.numpy().astype(np.int32))

    def _grow(self, num_computed_tokens: int) -> None:
        """Own the pages of all tokens that are demoted when so many are computed."""
        store = self.tables.store
        counts = self._page_counts(num_computed_tokens)
        self.num_left = self._num_evicted(num_computed_tokens)
        if (counts == self.tables.counts[self.row, self.layers]).all():
            return
        self.spare.release()
        store.pool.ensure_free(int((counts - self.tables.counts[self.row, self.layers]).sum()))
        self.tables.allocate(self.row, self.layers, counts)
        if self.scores is not None:
            self.scores = F.pad(self.scores, (0, int(counts.max()) * store.page_size - self.scores.shape[-1]))

    def _pages(self) -> Tensor:
        """Return the tables of demoted tokens, int64 [M, G, n]."""
        n = int(self.tables.counts[self.row, self.layers].max(initial=0))
        return self.tables.rows.gather_pages([self.row], self.layers, n)[0]

    def _slots(self, head: Tensor, places: Tensor, pos: Tensor) -> Tensor:
        """Return the slots of places [n] in the demoted tables of their heads, and of the trash page for holes."""
        slots = slots_at(self.tables.store, self._pages(), head, places)
        return torch.where(pos >= 0, slots, 0)

    def _write_scores(self, head: Tensor, places: Tensor, pos: Tensor, values: Tensor | None) -> None:
        """Keep the scores of tokens at these places [n], but for holes."""
        if self.scores is not None and values is not None:
            scores = self.scores.flatten(0, 1)
            scores[head, places] = torch.where(pos >= 0, values, scores[head, places])


def slots_at(store: PageStore, pages: Tensor, head: Tensor, places: Tensor) -> Tensor:
    """Return the slots of places [n] in the tables [M, G, pages] of their heads [n], int64."""
    table = pages.flatten(0, 1)
    S = store.page_size
    return table[head, places // S] * S + places % S
