"""Budgets carried out: a `Keeper` makes one row forget what its policy (kv/budget.py) values least.

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
from retain.kv.pool import Pool
from retain.kv.view import View

Ints = NDArray[np.int32]
PROTECTED = 2**32  # in the place of a priority; above all of them


def view(kv: KV, backend: ModuleType, pages: Ints, now: int) -> View:
    """What there is in tables [M, G, n]. `now`: the newest position."""
    p = torch.from_numpy(pages).long()
    pos, mass = kv.pos[p].flatten(-2), kv.mass[p].transpose(2, 3).flatten(-2)  # [M, G, n S], [M, G, C, n S]

    def read() -> tuple[Tensor, Tensor]:
        k, v = backend.read(kv, p.flatten())  # [M G n, S, D]
        return k.reshape(*pos.shape, -1), v.reshape(*pos.shape, -1)

    return View(pos, mass, now, read)


def ranks(seen: View, policy: Budget) -> Tensor:
    """A number for every slot, int64 [M, G, S]: the lowest goes first.

    Holes are below everything and those that must stay above; older before newer where priorities are equal.
    """
    bits = policy.priority(seen).float().contiguous().view(torch.int32).long()
    order = 2**31 + torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # positive, in the order of the floats
    order = torch.where(policy.protected(seen.pos, seen.now), PROTECTED, order)
    return torch.where(seen.pos < 0, -1, (order << 30) + seen.pos)


def slots(pages: Ints, places: Tensor, page_size: int) -> Tensor:
    """Slot numbers of places [M, G, n] in tables [M, G, pages], int32."""
    table = torch.from_numpy(pages)
    return table.gather(-1, places // page_size) * page_size + (places % page_size).int()


def punch(kv: KV, backend: ModuleType, pages: Ints, policy: Budget, now: int, used: Ints, n: int) -> Ints:
    """Make holes of n slots of each head, out of the first `used` [M, G] of its table: slots [M, G, n]."""
    rank = ranks(view(kv, backend, pages, now), policy)
    other = torch.arange(rank.shape[-1]) >= torch.from_numpy(used)[..., None]
    places = rank.masked_fill_(other, 2**63 - 1).topk(n, largest=False).indices
    gone = slots(pages, places, kv.page_size)
    kv.pos.view(-1)[gone.long()] = -1
    return gone.numpy()


def divide(rank: Tensor, size: int, among: str) -> Tensor:
    """Tokens of each head, int64 [M, G], where the heads of a layer, or all, divide a sum of budgets by rank."""
    M, G, S = rank.shape
    groups = rank.view(M if among == "layer" else 1, -1)
    best = groups.topk(size * M * G // len(groups)).indices + groups.shape[1] * torch.arange(len(groups))[:, None]
    return torch.bincount(best.flatten() // S, minlength=M * G).view(M, G)


def compact(
    kv: KV, backend: ModuleType, pages: Ints, policy: Budget, now: int, sizes: Tensor | None = None
) -> tuple[Ints, Ints]:
    """Keep `sizes` [M, G] tokens of each head, or what the policy says, at the front of its table; behind are holes.

    How many tokens each head kept, [M, G], and the slots behind them, [M, G, interval].
    """
    seen, S = view(kv, backend, pages, now), kv.page_size
    rank = ranks(seen, policy)
    if sizes is None:
        sizes = policy.sizes(seen) if policy.share == "none" else divide(rank, policy.size, policy.share)
    most = int(sizes.max())
    places = torch.arange(most)
    mine = places < sizes[..., None]  # [M, G, most]; the rest is padding: nobody's slot, onto itself
    stay = rank.topk(most).indices.masked_fill(~mine, pages.shape[2] * S).sort().values
    src = slots(pages, stay.clamp(max=pages.shape[2] * S - 1), S).masked_fill_(~mine, 0)
    dst = slots(pages, places.expand_as(stay), S).masked_fill_(~mine, 0)
    backend.move(kv, src.flatten(0, 1), dst.flatten(0, 1))
    left = torch.from_numpy(pages)[..., None] * S + torch.arange(S, dtype=torch.int32)  # [M, G, pages, S]
    behind = torch.arange(pages.shape[2] * S) >= sizes[..., None]
    kv.pos.view(-1)[left.flatten(2)[behind].long()] = -1
    spare = sizes[..., None] + torch.arange(policy.interval)
    return sizes.numpy().astype(np.int32), slots(pages, spare, S).numpy()


class Keeper:
    """One row, whose `layers` [M] forget as its policy says, next when `due` tokens are computed.

    `pages` and `counts` are the row's own tables, [L, G, n] and [L, G]: what changes here changes there. Where there
    are `holes` [M, G, n], fresh tokens come into them: that at position `since` + i into holes[..., i].
    """

    def __init__(
        self, policy: Budget, layers: Ints, kv: KV, backend: ModuleType, pool: Pool, pages: Ints, counts: Ints
    ):
        self.policy, self.layers = policy, layers
        self.kv, self.backend, self.pool, self.pages, self.counts = kv, backend, pool, pages, counts
        self.due = policy.due(0)
        self.sizes: Ints = np.full((len(layers), counts.shape[1]), policy.size, np.int32)  # tokens of each head
        self.since = 0
        self.holes: Ints | None = None
        self.saved: tuple[Ints, Ints] | None = None  # pages of rings, and copies of what they held

    def forget(self, computed: int) -> bool:
        """At the end of the prompt the budget begins; then its spare slots fill and are emptied, again and again.

        Whether pages were given back; such a row's layers never grow again.
        """
        policy, begins = self.policy, False
        if computed < self.due:
            return False
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
            self._compact(computed, None)
        return begins

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
        return int(self.counts.sum()) < held

    def _compact(self, computed: int, sizes: Tensor | None) -> None:
        tables, policy = self._tables(), self.policy
        self.sizes, self.holes = compact(self.kv, self.backend, tables, policy, computed - 1, sizes)
        self.since = computed
        self._keep(-(-(self.sizes + policy.interval) // self.kv.page_size))

    def tries(self, upto: int) -> bool:
        """Whether growing so far begins to read the prompt again."""
        policy = self.policy
        over = policy.rereads > 0 and policy.prompt > policy.size
        return over and self.due == policy.prompt < upto and not self.saved

    def save(self) -> bool:
        """What follows is only tried: remember what rings hold. False when there are no pages for it."""
        pages = self._rings()
        if len(pages) > self.pool.free:
            return False
        self.saved = pages, self.pool.take(len(pages))
        self.backend.copy(self.kv, *map(_long, self.saved))
        return True

    def rewind(self, computed: int) -> None:
        """Everything from position `computed` on was only tried: it is holes again, and rings are what they were."""
        assert self.saved
        tried = _long(self.pages[self._owned()])
        pos = self.kv.pos[tried]
        self.kv.pos[tried] = pos.masked_fill_(pos >= computed, -1)
        self.backend.copy(self.kv, *map(_long, reversed(self.saved)))

    def _punch(self, computed: int, used: Ints, n: int) -> None:
        """Holes for the next tokens."""
        self.holes = punch(self.kv, self.backend, self._tables(), self.policy, computed - 1, used, n)
        self.since = computed

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


def _long(pages: Ints) -> Tensor:
    return torch.from_numpy(pages).long()
