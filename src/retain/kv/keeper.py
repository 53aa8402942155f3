"""One row that forgets: when its policy (kv/budget.py) says, from its own tables, by the means of kv/forget.py.

What is not known here: other rows, rings, who is scheduled.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import KV
from retain.kv.budget import Budget
from retain.kv.forget import Turn, compact, punch, renumber
from retain.kv.pool import Pool
from retain.kv.witness import AttentionTrace

Ints = NDArray[np.int32]


class Keeper:
    """One row, whose `layers` [M] forget as its policy says, next when `due` tokens are computed.

    `pages` and `counts` are the row's own tables, [L, G, n] and [L, G]: what changes here changes there. Where there
    are `holes` [M, G, n], fresh tokens come into them: that at position `since` + i into holes[..., i].
    """

    def __init__(
        self,
        policy: Budget,
        layers: Ints,
        kv: KV,
        backend: ModuleType,
        pool: Pool,
        pages: Ints,
        counts: Ints,
        turn: Turn | None,
    ):
        self.policy, self.layers, self.turn = policy, layers, turn
        self.shift = 0  # how far tokens that come are numbered below their place in the text
        self.kv, self.backend, self.pool, self.pages, self.counts = kv, backend, pool, pages, counts
        self.due = policy.due(0)
        self.sizes: Ints = np.full((len(layers), counts.shape[1]), policy.size, np.int32)  # tokens of each head
        self.since = 0
        self.holes: Tensor | None = None
        self.saved: tuple[Ints, Ints] | None = None  # pages of rings, and copies of what they held
        self.lent: Ints | None = None  # pages for a prompt in one layer, [G, n]
        self.forgot = 0  # slots, of all heads, so far
        self.witness: AttentionTrace | None = None  # of such a step
        self.own: tuple[Ints, Ints] | None = None  # tables [M, G, n] and counts that they stand in for in a step

    def forget(self, computed: int) -> bool:
        """What is due. At the end of the prompt the budget begins; then its spare slots fill and are emptied, again and
        again. Whether pages were given back; such a row's layers never grow again.
        """
        policy, begins = self.policy, False
        self.due = policy.due(computed)
        if computed < policy.prompt:  # a streamed chunk
            owned = self.counts[self.layers] * np.int32(self.kv.page_size)
            self._punch(computed, owned, int(owned.min()) - policy.size)
        elif computed > policy.prompt:
            self._punch(computed, self.sizes + np.int32(policy.interval), policy.interval)
        elif begins := computed > policy.size:
            if self.saved:
                self.pool.give(self.saved[1])
                self.saved = None
            if policy.prefill != "layers":
                self._compact(computed, None)
        self._count(computed)
        return begins

    def borrowed(self, pos: Ints) -> Ints | None:
        """The slots [G, n] of fresh tokens in borrowed pages; None: there are none."""
        S = self.kv.page_size
        return None if self.lent is None else self.lent[:, pos // S] * np.int32(S) + pos % S

    # ---- a prompt that goes layer by layer: its tokens come into pages that all layers use in turn ---------------

    @property
    def layered(self) -> bool:
        """Whether it is still to come."""
        return self.policy.prefill == "layers" and self.since == 0 and self.policy.prompt > self.policy.size

    def borrow(self) -> bool:
        """Take the pages that it needs besides its own. False when there are none."""
        G, n = self.counts.shape[1], -(-self.policy.prompt // self.kv.page_size)
        if self.lent is None and self.pool.room(G * n):
            self.lent = self.pool.take(G * n).reshape(G, n)
            self.kv.pos[self.kv.index(self.lent)] = -1
        return self.lent is not None

    def lend(self, witness: AttentionTrace | None) -> Keeper:
        """A step begins: every layer finds these pages in its tables. `witness` sees what is forgotten. Itself."""
        assert self.lent is not None
        self.witness = witness
        self.own = self.pages[self.layers], self.counts[self.layers]
        shape = *self.sizes.shape, self.policy.interval
        self.holes = torch.zeros(shape, dtype=torch.int32, device=self.kv.device)
        self.pages[self.layers, :, : self.lent.shape[1]] = self.lent
        self.counts[self.layers] = self.lent.shape[1]
        return self

    def looked(self, layer: int) -> None:
        """A layer has: what it keeps goes into pages of its own. With the last one, the others go back."""
        where = np.flatnonzero(self.layers == layer)
        if not len(where):
            return
        assert self.own and self.lent is not None and self.holes is not None
        if self.witness:
            self.witness.record_layer(self.kv, layer, self.lent)
        i, policy, now = int(where[0]), self.policy, self.policy.prompt - 1
        tables, counts = (x[i : i + 1] for x in self.own)
        to = tables[..., : int(counts.max())]
        self.holes[i : i + 1] = compact(self.kv, self.backend, self.lent[None], policy, now, to=to)[1]
        self.pages[layer], self.counts[layer] = tables[0], counts[0]
        if i == len(self.layers) - 1:
            self.pool.give(self.lent.ravel())
            self.since, self.lent, self.own = policy.prompt, None, None

    def besides(self) -> Ints:
        """Pages that are the row's and not in its tables (but for the time of a step, which must not fail)."""
        held = [] if self.lent is None else [self.lent.ravel()]
        return np.concatenate([*held, *(self.saved or ())[1:], np.zeros(0, np.int32)])

    def shrink(self, computed: int) -> bool:
        """Halve the budget, where the policy allows it. Whether pages were given back."""
        smaller = self.policy.shrunk()
        if smaller is None or self.holes is None or computed < self.policy.prompt:
            return False
        held = int(self.counts.sum())
        least = smaller.sinks + smaller.recent.of(smaller.size)
        sizes = torch.from_numpy(self.sizes).long() * smaller.size // self.policy.size
        self.policy = smaller
        self._compact(computed, sizes.clamp(min=least))
        self.due = computed + smaller.interval
        self._count(computed)
        return int(self.counts.sum()) < held

    def _count(self, computed: int) -> None:
        """Of so many tokens each head has kept its share."""
        self.forgot = computed * self.sizes.size - int(np.minimum(self.sizes, computed).sum())

    def _compact(self, computed: int, sizes: Tensor | None) -> None:
        tables, policy = self._tables(), self.policy
        self.sizes, self.holes = compact(self.kv, self.backend, tables, policy, computed - 1 - self.shift, sizes)
        self.since = computed
        self._keep(-(-(self.sizes + policy.interval) // self.kv.page_size))
        self._renumber(computed)

    def tries(self, upto: int) -> bool:
        """Whether growing so far begins to read the prompt again."""
        policy = self.policy
        over = policy.rereads > 0 and policy.prompt > policy.size
        return over and self.due == policy.prompt < upto and not self.saved

    def save(self) -> bool:
        """What follows is only tried: remember what rings hold. False when there are no pages for it."""
        pages = self._rings()
        if not self.pool.room(len(pages)):
            return False
        self.saved = pages, self.pool.take(len(pages))
        self.backend.copy(self.kv, *map(self.kv.index, self.saved))
        return True

    def rewind(self, computed: int) -> None:
        """Everything from position `computed` on was only tried: it is holes again, and rings are what they were."""
        assert self.saved
        tried = self.kv.index(self.pages[self._owned()])
        pos = self.kv.pos[tried]
        self.kv.pos[tried] = pos.masked_fill_(pos >= computed, -1)
        self.backend.copy(self.kv, *map(self.kv.index, reversed(self.saved)))

    def _punch(self, computed: int, used: Ints, n: int) -> None:
        """Holes for the next tokens."""
        now = computed - 1 - self.shift
        self.holes = punch(self.kv, self.backend, self._tables(), self.policy, now, used, n)
        self.since = computed
        self._renumber(computed)

    def _renumber(self, computed: int) -> None:
        if self.policy.positions == "new":
            tables = self._tables()
            renumber(self.kv, self.backend, tables, self.turn)
            self.shift = computed - 1 - int(self.kv.pos[self.kv.index(tables[0, 0])].max())

    def _owned(self) -> NDArray[np.bool_]:
        """Which entries of the row's tables are pages, [L, G, n]."""
        mine: NDArray[np.bool_] = np.arange(self.pages.shape[-1]) < self.counts[..., None]
        return mine

    def _tables(self) -> Ints:
        """Those of the layers, [M, G, n]; what they do not own is the trash page."""
        n = int(self.counts[self.layers].max())
        tables: Ints = np.where(self._owned(), self.pages, 0)[self.layers, :, :n]
        return tables

    def _rings(self) -> Ints:
        """All pages of the other layers."""
        others = np.ones(len(self.pages), bool)
        others[self.layers] = False
        rings: Ints = self.pages[self._owned() & others[:, None, None]]
        return rings

    def _keep(self, counts: Ints) -> None:
        """Give back all but the first `counts` [M, G] pages of each head."""
        over = self._owned()[self.layers] & (np.arange(self.pages.shape[-1]) >= counts[..., None])
        self.pool.give(self.pages[self.layers][over])
        self.counts[self.layers] = counts
