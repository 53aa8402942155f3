"""One row that forgets: when its policy (kv/budget.py) says, from its own tables, by the means of kv/forget.py.

What is not known here: other rows, rings, who is scheduled.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import KV
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.operations import ShiftKeys, compact, punch, renumber
from retain.kv.memory.pool import PagePool
from retain.kv.stats.attention_trace import AttentionTrace

Ints = NDArray[np.int32]


class BudgetEvictor:
    """One row, whose `layers` [M] forget as its policy says, next when `due` tokens are computed.

    `pages` and `counts` are the row's own tables, [L, G, n] and [L, G]: what changes here changes there. Where there
    are `holes` [M, G, n], fresh tokens come into them: that at position `since` + i into holes[..., i].
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        layers: Ints,
        kv: KV,
        backend: ModuleType,
        pool: PagePool,
        pages: Ints,
        counts: Ints,
        shift_keys: ShiftKeys | None,
    ):
        self.policy, self.layers, self.shift_keys = policy, layers, shift_keys
        self.position_offset = 0  # how far tokens that come are numbered below their place in the text
        self.kv, self.backend, self.pool, self.pages, self.counts = kv, backend, pool, pages, counts
        self.next_eviction = policy.next_eviction(0)
        self.head_budgets: Ints = np.full(
            (len(layers), counts.shape[1]), policy.budget_tokens, np.int32
        )  # tokens of each head
        self.holes_from = 0
        self.holes: Tensor | None = None
        self.ring_backup: tuple[Ints, Ints] | None = None  # pages of rings, and copies of what they held
        self.scratch_pages: Ints | None = None  # pages for a prompt in one layer, [G, n]
        self.num_evicted = 0  # slots, of all heads, so far
        self.trace: AttentionTrace | None = None  # of such a step
        self.saved_tables: tuple[Ints, Ints] | None = (
            None  # tables [M, G, n] and counts that they stand in for in a step
        )

    def evict(self, num_computed_tokens: int) -> bool:
        """What is due. At the end of the prompt the budget begins; then its spare slots fill and are emptied, again and
        again. Whether pages were given back; such a row's layers never grow again.
        """
        policy, begins = self.policy, False
        self.next_eviction = policy.next_eviction(num_computed_tokens)
        if num_computed_tokens < policy.prompt_len:  # a streamed chunk
            owned = self.counts[self.layers] * np.int32(self.kv.page_size)
            self._punch(num_computed_tokens, owned, int(owned.min()) - policy.budget_tokens)
        elif num_computed_tokens > policy.prompt_len:
            self._punch(num_computed_tokens, self.head_budgets + np.int32(policy.interval), policy.interval)
        elif begins := num_computed_tokens > policy.budget_tokens:
            if self.ring_backup:
                self.pool.free(self.ring_backup[1])
                self.ring_backup = None
            if policy.prefill != "layers":
                self._compact(num_computed_tokens, None)
        self._update_num_evicted(num_computed_tokens)
        return begins

    def scratch_slots(self, pos: Ints) -> Ints | None:
        """The slots [G, n] of fresh tokens in borrowed pages; None: there are none."""
        S = self.kv.page_size
        return None if self.scratch_pages is None else self.scratch_pages[:, pos // S] * np.int32(S) + pos % S

    # ---- a prompt that goes layer by layer: its tokens come into pages that all layers use in turn ---------------

    @property
    def needs_layerwise_prefill(self) -> bool:
        """Whether it is still to come."""
        return (
            self.policy.prefill == "layers"
            and self.holes_from == 0
            and self.policy.prompt_len > self.policy.budget_tokens
        )

    def allocate_scratch(self) -> bool:
        """Take the pages that it needs besides its own. False when there are none."""
        G, n = self.counts.shape[1], -(-self.policy.prompt_len // self.kv.page_size)
        if self.scratch_pages is None and self.pool.ensure_free(G * n):
            self.scratch_pages = self.pool.allocate(G * n).reshape(G, n)
            self.kv.pos[self.kv.to_index(self.scratch_pages)] = -1
        return self.scratch_pages is not None

    def start_layerwise(self, trace: AttentionTrace | None) -> BudgetEvictor:
        """A step begins: every layer finds these pages in its tables. `witness` sees what is forgotten. Itself."""
        assert self.scratch_pages is not None
        self.trace = trace
        self.saved_tables = self.pages[self.layers], self.counts[self.layers]
        shape = *self.head_budgets.shape, self.policy.interval
        self.holes = torch.zeros(shape, dtype=torch.int32, device=self.kv.device)
        self.pages[self.layers, :, : self.scratch_pages.shape[1]] = self.scratch_pages
        self.counts[self.layers] = self.scratch_pages.shape[1]
        return self

    def finish_layer(self, layer: int) -> None:
        """A layer has: what it keeps goes into pages of its own. With the last one, the others go back."""
        where = np.flatnonzero(self.layers == layer)
        if not len(where):
            return
        assert self.saved_tables and self.scratch_pages is not None and self.holes is not None
        if self.trace:
            self.trace.record_layer(self.kv, layer, self.scratch_pages)
        i, policy, now = int(where[0]), self.policy, self.policy.prompt_len - 1
        tables, counts = (x[i : i + 1] for x in self.saved_tables)
        to = tables[..., : int(counts.max())]
        self.holes[i : i + 1] = compact(self.kv, self.backend, self.scratch_pages[None], policy, now, dst_pages=to)[1]
        self.pages[layer], self.counts[layer] = tables[0], counts[0]
        if i == len(self.layers) - 1:
            self.pool.free(self.scratch_pages.ravel())
            self.holes_from, self.scratch_pages, self.saved_tables = policy.prompt_len, None, None

    def extra_pages(self) -> Ints:
        """Pages that are the row's and not in its tables (but for the time of a step, which must not fail)."""
        held = [] if self.scratch_pages is None else [self.scratch_pages.ravel()]
        return np.concatenate([*held, *(self.ring_backup or ())[1:], np.zeros(0, np.int32)])

    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the budget, where the policy allows it. Whether pages were given back."""
        smaller = self.policy.halved()
        if smaller is None or self.holes is None or num_computed_tokens < self.policy.prompt_len:
            return False
        held = int(self.counts.sum())
        least = smaller.sinks + smaller.recent.resolve(smaller.budget_tokens)
        sizes = torch.from_numpy(self.head_budgets).long() * smaller.budget_tokens // self.policy.budget_tokens
        self.policy = smaller
        self._compact(num_computed_tokens, sizes.clamp(min=least))
        self.next_eviction = num_computed_tokens + smaller.interval
        self._update_num_evicted(num_computed_tokens)
        return int(self.counts.sum()) < held

    def _update_num_evicted(self, num_computed_tokens: int) -> None:
        """Of so many tokens each head has kept its share."""
        self.num_evicted = num_computed_tokens * self.head_budgets.size - int(
            np.minimum(self.head_budgets, num_computed_tokens).sum()
        )

    def _compact(self, num_computed_tokens: int, head_budgets: Tensor | None) -> None:
        tables, policy = self._layer_tables(), self.policy
        self.head_budgets, self.holes = compact(
            self.kv, self.backend, tables, policy, num_computed_tokens - 1 - self.position_offset, head_budgets
        )
        self.holes_from = num_computed_tokens
        self._trim_pages(-(-(self.head_budgets + policy.interval) // self.kv.page_size))
        self._renumber(num_computed_tokens)

    def starts_reread(self, end_position: int) -> bool:
        """Whether growing so far begins to read the prompt again."""
        policy = self.policy
        over = policy.rereads > 0 and policy.prompt_len > policy.budget_tokens
        return over and self.next_eviction == policy.prompt_len < end_position and not self.ring_backup

    def snapshot_rings(self) -> bool:
        """What follows is only tried: remember what rings hold. False when there are no pages for it."""
        pages = self._ring_pages()
        if not self.pool.ensure_free(len(pages)):
            return False
        self.ring_backup = pages, self.pool.allocate(len(pages))
        self.backend.copy(self.kv, *map(self.kv.to_index, self.ring_backup))
        return True

    def rollback(self, num_computed_tokens: int) -> None:
        """Everything from position `computed` on was only tried: it is holes again, and rings are what they were."""
        assert self.ring_backup
        tried = self.kv.to_index(self.pages[self._owned_mask()])
        pos = self.kv.pos[tried]
        self.kv.pos[tried] = pos.masked_fill_(pos >= num_computed_tokens, -1)
        self.backend.copy(self.kv, *map(self.kv.to_index, reversed(self.ring_backup)))

    def _punch(self, num_computed_tokens: int, slots_used: Ints, n: int) -> None:
        """Holes for the next tokens."""
        now = num_computed_tokens - 1 - self.position_offset
        self.holes = punch(self.kv, self.backend, self._layer_tables(), self.policy, now, slots_used, n)
        self.holes_from = num_computed_tokens
        self._renumber(num_computed_tokens)

    def _renumber(self, num_computed_tokens: int) -> None:
        if self.policy.positions == "new":
            tables = self._layer_tables()
            renumber(self.kv, self.backend, tables, self.shift_keys)
            self.position_offset = num_computed_tokens - 1 - int(self.kv.pos[self.kv.to_index(tables[0, 0])].max())

    def _owned_mask(self) -> NDArray[np.bool_]:
        """Which entries of the row's tables are pages, [L, G, n]."""
        mine: NDArray[np.bool_] = np.arange(self.pages.shape[-1]) < self.counts[..., None]
        return mine

    def _layer_tables(self) -> Ints:
        """Those of the layers, [M, G, n]; what they do not own is the trash page."""
        n = int(self.counts[self.layers].max())
        tables: Ints = np.where(self._owned_mask(), self.pages, 0)[self.layers, :, :n]
        return tables

    def _ring_pages(self) -> Ints:
        """All pages of the other layers."""
        others = np.ones(len(self.pages), bool)
        others[self.layers] = False
        rings: Ints = self.pages[self._owned_mask() & others[:, None, None]]
        return rings

    def _trim_pages(self, counts: Ints) -> None:
        """Give back all but the first `counts` [M, G] pages of each head."""
        over = self._owned_mask()[self.layers] & (np.arange(self.pages.shape[-1]) >= counts[..., None])
        self.pool.free(self.pages[self.layers][over])
        self.counts[self.layers] = counts
