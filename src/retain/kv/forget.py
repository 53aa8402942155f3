"""Which slots stay, for policies that have to look (kv/budget.py). What is not known here: who owns pages."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import KV
from retain.kv.budget import Budget
from retain.kv.view import View

Ints = NDArray[np.int32]
PROTECTED = 2**32  # in the place of a priority; above all of them


@dataclass
class Keeper:
    """The state of one row: `layers` forget as `policy` says, next when `due` tokens are computed.

    Where there are holes, fresh tokens come into them: that at position `since` + i into holes[..., i].
    """

    policy: Budget
    layers: Ints  # [M]
    due: int
    sizes: Ints  # [M, G]: tokens that each head keeps
    since: int = 0
    holes: Ints | None = None  # slots [M, G, n]


def view(kv: KV, backend: ModuleType, pages: Ints, now: int) -> View:
    """What there is in tables [M, G, n]. `now`: the newest position."""
    p = torch.from_numpy(pages).long()
    pos, mass = kv.pos[p].flatten(-2), kv.mass[p].transpose(2, 3).flatten(-2)  # [M, G, n S], [M, G, C, n S]

    def read() -> tuple[Tensor, Tensor]:
        k, v = backend.read(kv, p.flatten())  # [M G n, S, D]
        return k.view(*pos.shape, -1), v.view(*pos.shape, -1)

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


def compact(kv: KV, backend: ModuleType, pages: Ints, policy: Budget, now: int) -> tuple[Ints, Ints]:
    """Keep what the policy wants of each head, and move it to the front of its table; all other slots are holes.

    How many tokens each head kept, [M, G], and the slots behind them, [M, G, interval].
    """
    seen, S = view(kv, backend, pages, now), kv.page_size
    rank = ranks(seen, policy)
    sizes = policy.sizes(seen) if policy.share == "none" else divide(rank, policy.size, policy.share)  # [M, G]
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
