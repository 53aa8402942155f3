"""What a policy computes once for each slot: the numbers follow the slots of one row as they move and are reused."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView, KeyTransform
from retain.kv.memory.page_store import PageStore


class SlotScores:
    """Numbers for the slots of a row, by place in the tables of its unwindowed layers [M] and kv heads [G].

    A slot is scored when it is first ranked, and again when another position was written into it.
    """

    def __init__(self, store: PageStore, transform: KeyTransform, key_factors: Tensor | None):
        self.store = store
        self.transform = transform
        self.key_factors = key_factors  # [M, G, 1, D]
        self._scores = torch.zeros(0)  # float32 [M, G, S]
        self._pos = torch.zeros(0, dtype=torch.int32)  # [M, G, S]: the positions that were scored; -1 for none

    def get_state(self) -> tuple[Tensor, Tensor]:
        """Return the scores and the positions that were scored, both [M, G, S]."""
        return self._scores, self._pos

    def set_state(self, state: tuple[Tensor, Tensor]) -> None:
        """Take over copies of what another row's slots at the same places have."""
        self._scores, self._pos = (x.clone() for x in state)

    def update(self, policy: BudgetPolicy, pages: Tensor, query_position: int) -> Tensor | None:
        """Score the slots that are new, and return the scores of all slots of tables [M, G, pages].

        None where the policy scores no slots.
        """
        if not policy.scores_slots:
            return None
        kv = self.store.kv
        M, G, n = pages.shape
        pos = kv.pos[pages].view(M, G, -1)  # [M, G, S]
        if not self._scores.numel():
            self._scores = torch.zeros_like(pos, dtype=torch.float32)
            self._pos = torch.full_like(pos, -1)
        self._resize(n * kv.page_size)
        is_new = (pos != self._pos) & (pos >= 0)
        num_new = int(is_new.sum(-1).max())
        # Of a whole prompt one layer is read at a time: K and V in float32 take twice their memory in the pool.
        step = 1 if num_new > 4 * policy.interval else M
        for first in range(0, M if num_new else 0, step):
            layers = slice(first, first + step)
            places = is_new[layers].byte().topk(num_new).indices
            found = policy.score_slots(self._view(pages[layers], places, layers, query_position))
            known = self._scores[layers].gather(-1, places)
            self._scores[layers].scatter_(-1, places, torch.where(is_new[layers].gather(-1, places), found, known))
        self._pos = pos
        return self._scores

    def keep(self, places: Tensor, num_slots: int) -> None:
        """Record that the slots at these places [M, G, n] moved to the front, in order, of tables of `num_slots`."""
        if self._scores.numel():
            places = places.clamp(max=self._scores.shape[-1] - 1)
            self._scores = self._scores.gather(-1, places)
            self._pos = self._pos.gather(-1, places)
            self._resize(num_slots)

    def _resize(self, num_slots: int) -> None:
        more = num_slots - self._scores.shape[-1]  # a negative number cuts
        self._scores = F.pad(self._scores, (0, more))
        self._pos = F.pad(self._pos, (0, more), value=-1)

    def _view(self, table: Tensor, places: Tensor, layers: slice, query_position: int) -> CacheView:
        kv = self.store.kv
        S = self.store.page_size
        slots = table.gather(-1, places // S) * S + places % S  # [m, G, n]
        read = partial(self.store.read, slots)
        pos = kv.pos.view(-1)[slots]
        mass = kv.mass.transpose(1, 2)[slots // S, slots % S].transpose(-1, -2)  # [m, G, C, n]
        factors = None if self.key_factors is None else self.key_factors[layers]
        return CacheView(pos, mass, query_position, read, layers, transform=self.transform, key_factors=factors)
