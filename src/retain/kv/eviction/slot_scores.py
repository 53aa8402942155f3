"""What a policy computes once for each slot: the numbers follow the slots of one row as they move and are reused."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView, ShiftKeys
from retain.kv.memory.page_store import PageStore
from retain.types import Ints


class SlotScores:
    """Numbers for the slots of a row, float32 [M, G, S] by place in the tables of its unwindowed layers [M]."""

    def __init__(self, store: PageStore, shift_keys: ShiftKeys | None):
        self.store, self.shift_keys = store, shift_keys
        self._scores: Tensor | None = None  # None: no slot is scored yet
        self._unscored: Tensor | None = None  # places [M, G, n] that were written since

    def update(self, policy: BudgetPolicy, pages: Ints, query_position: int) -> Tensor | None:
        """Score the slots that are new, and return the scores of all slots of tables [M, G, pages].

        The first time all slots are new; then one layer is read at a time. None where the policy scores no slots.
        """
        if not policy.scores_slots:
            return None
        places = torch.arange(pages.shape[2] * self.store.page_size, device=self.store.kv.device)
        if self._scores is None or self._scores.shape[-1] != len(places):
            whole = places.expand(1, pages.shape[1], -1)
            layers = [slice(i, i + 1) for i in range(len(pages))]
            scored = [policy.score_slots(self._view(pages[i], whole, i, query_position)) for i in layers]
            self._scores = torch.cat(scored)
        elif self._unscored is not None:
            view = self._view(pages, self._unscored, slice(0, len(pages)), query_position)
            self._scores.scatter_(-1, self._unscored, policy.score_slots(view))
        self._unscored = None
        return self._scores

    def keep(self, places: Tensor, num_slots: int) -> None:
        """Record that the slots at these places [M, G, n] moved to the front, in order, of tables of `num_slots`."""
        if self._scores is not None:
            moved = self._scores.gather(-1, places.clamp(max=self._scores.shape[-1] - 1))
            self._scores = torch.nn.functional.pad(moved[..., :num_slots], (0, max(num_slots - moved.shape[-1], 0)))

    def expect(self, places: Tensor) -> None:
        """Record that the slots at these places [M, G, n] are written before the next update."""
        self._unscored = places

    def _view(self, pages: Ints, places: Tensor, layers: slice, query_position: int) -> CacheView:
        kv, S = self.store.kv, self.store.page_size
        table = kv.to_index(pages)  # [m, G, pages]
        slots = table.gather(-1, places // S) * S + places % S  # [m, G, n]

        def read() -> tuple[Tensor, Tensor]:
            k, v = self.store.backend.read_slots(kv, slots.flatten())
            return k.view(*slots.shape, -1), v.view(*slots.shape, -1)

        pos = kv.pos.view(-1)[slots]
        mass = kv.mass.transpose(1, 2)[slots // S, slots % S].transpose(-1, -2)  # [m, G, C, n]
        return CacheView(pos, mass, query_position, read, layers, shift_keys=self.shift_keys)
