"""The demoted tokens of one row: what its budget would forget goes to four bits, and is forgotten from there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.eviction_order import eviction_key
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.operations import Victims, allocate_budgets, build_view, gather_slots
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints


@dataclass(frozen=True)
class DemotedSlots:
    """Tokens on their way to four bits: K, V, mass and positions of n slots; padded to the places of each head."""

    valid: Tensor  # bool [M, G, m]: the entries that are tokens, first in each head; n of them
    k: Tensor  # float32 [n, D]
    v: Tensor  # float32 [n, D]
    mass: Tensor  # float32 [n, C]
    pos: Tensor  # int32 [n]
    scores: Tensor | None  # float32 [n]: what the policy keeps for each slot
    capacities: Tensor  # int64 [M, G]: tokens that each head demotes at most


class Demoter:
    """Demote from the unwindowed layers [M] of one row; each head has tables of its own for that.

    The budget begins with `take`, before slots move, and `begin`, when their pages are free. Later tokens come by
    `add`; the lowest of the demoted make room for them.
    """

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, row: int, layers: Ints):
        assert tables.demoted, "the cache was built without room for demoted tokens"
        self.policy, self.tables, self.row, self.layers = policy, tables.demoted, row, layers
        self.block_tables, self.spare = tables, np.zeros(0, np.int32)  # pages that `begin` will need
        self.capacities: Tensor | None = None  # int64 [M, G], once the budget has begun
        self.scores: Tensor | None = None  # float32 [M, G, S]

    @property
    def num_tokens(self) -> int:
        """Tokens of all heads that are demoted now."""
        kv, pages = self.tables.store.kv, self.tables.page_list(self.row)
        return int((kv.pos[kv.to_index(pages)] >= 0).sum())

    def reserve(self, num_pages: int) -> bool:
        """Own the pages that the row will need beyond those it frees, if all need `num_pages`. False if there are none.

        So the budget never finds the pool empty when it begins.
        """
        owned = int(self.block_tables.counts[self.row, self.layers].sum())
        missing = num_pages - owned - len(self.spare) if self.capacities is None else 0
        if missing <= 0:
            return True
        if not self.tables.store.pool.ensure_free(missing):
            return False
        self.spare = np.concatenate([self.spare, self.tables.store.allocate(missing)])
        return True

    def take(self, pages: Ints, query_position: int, slot_scores: Tensor | None) -> DemotedSlots:
        """Read the tokens of tables [M, G, pages] that rank next to those that the budget keeps."""
        policy, store, S = self.policy, self.block_tables.store, self.block_tables.page_size
        view = build_view(store, pages, query_position, slot_scores)
        rank = eviction_key(policy.priority(view), view.pos, *policy.evictable_range(query_position))
        num_tokens = query_position + 1
        both = min(policy.budget_tokens + policy.demoted_tokens, num_tokens)
        if policy.share == "none":
            kept, upto = policy.head_budgets(view), torch.full(rank.shape[:2], both)
        else:
            kept, upto = (allocate_budgets(rank, n, policy.share) for n in (policy.budget_tokens, both))
        i = torch.arange(int((upto - kept).max()))
        order = rank.topk(int(upto.max())).indices
        places = order.gather(-1, (kept[..., None] + i).clamp(max=order.shape[-1] - 1))  # [M, G, m]
        valid = i < (upto - kept)[..., None]
        capacities = upto - kept + (policy.budget_tokens + policy.demoted_tokens - both)  # room for the answer
        slots = gather_slots(pages, places, S)[valid].long()
        scores = None if slot_scores is None else slot_scores.gather(-1, places)[valid]
        return self._read(store.kv, slots, store.kv.pos.view(-1)[slots], valid, scores, capacities)

    def begin(self, demoted: DemotedSlots) -> None:
        """Own the pages of the demoted tokens, and write them."""
        self._allocate(demoted.capacities)
        places = torch.arange(demoted.valid.shape[-1]).expand(demoted.valid.shape)
        self._write(demoted, places)

    def add(self, victims: Victims, query_position: int, slot_scores: Tensor | None) -> None:
        """Take the tokens that a budget has just evicted, or as many of them as a head demotes, the highest first."""
        if self.capacities is None:
            self._allocate(torch.full(victims.pos.shape[:2], self.policy.demoted_tokens))
        assert self.capacities is not None
        store, n = self.tables.store, victims.pos.shape[-1]
        pages = self.tables.layer_tables(self.row, self.layers)
        view = build_view(store, pages, query_position, self.scores)
        key = eviction_key(self.policy.priority(view), view.pos, *self.policy.evictable_range(query_position))
        key.masked_fill_(torch.arange(key.shape[-1]) >= self.capacities[..., None], 2**63 - 1)
        to = key.topk(min(n, key.shape[-1]), largest=False).indices  # free places first, then the lowest tokens
        flipped = [x.flip(-1)[..., : to.shape[-1]] for x in (victims.slots, victims.pos, victims.places)]
        slots, pos, places = flipped
        valid = (pos >= 0) & (torch.arange(to.shape[-1]) < self.capacities[..., None])
        scores = None if slot_scores is None else slot_scores.gather(-1, places)[valid]
        kv = self.block_tables.kv
        self._write(self._read(kv, slots[valid].long(), pos[valid], valid, scores, self.capacities), to)

    def _allocate(self, capacities: Tensor) -> None:
        store, counts = self.tables.store, -(-capacities.numpy() // self.tables.store.page_size)
        store.pool.free(self.spare)
        self.spare, self.capacities = self.spare[:0], capacities
        store.pool.ensure_free(int(counts.sum()))
        self.tables.allocate(self.row, self.layers, counts.astype(np.int32))
        if self.policy.scores_slots:
            self.scores = torch.zeros(*capacities.shape, int(counts.max()) * store.page_size)

    def _read(
        self, kv: KV, slots: Tensor, pos: Tensor, valid: Tensor, scores: Tensor | None, capacities: Tensor
    ) -> DemotedSlots:
        k, v = self.block_tables.store.backend.read_slots(kv, slots)
        mass = kv.mass.transpose(1, 2)[slots // kv.page_size, slots % kv.page_size]
        return DemotedSlots(valid, k, v, mass, pos, scores, capacities)

    def _write(self, demoted: DemotedSlots, places: Tensor) -> None:
        """Write tokens to these places [M, G, m] of the demoted tables."""
        store, valid = self.tables.store, demoted.valid
        kv, pages = store.kv, self.tables.layer_tables(self.row, self.layers)
        slots = gather_slots(pages, places, kv.page_size)[valid]
        store.write_slots(slots, demoted.k, demoted.v, demoted.pos)
        kv.mass.transpose(1, 2)[slots.long() // kv.page_size, slots.long() % kv.page_size] = demoted.mass
        if self.scores is not None and demoted.scores is not None:
            layer, head, i = valid.nonzero(as_tuple=True)
            self.scores[layer, head, places[layer, head, i]] = demoted.scores
