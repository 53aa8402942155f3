"""Slots that are forgotten: tables of pages, and what a policy (kv/budget.py) values least in them.

What is not known here: whose tables these are, and when (kv/keeper.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import KV
from retain.kernels.order import order
from retain.kv.budget import Budget
from retain.kv.view import View

Ints = NDArray[np.int32]
Turn = Callable[[Tensor, Tensor], Tensor]  # keys [n, D] as cached, by how many positions [n] -> the same elsewhere


def view(kv: KV, backend: ModuleType, pages: Ints, now: int) -> View:
    """What there is in tables [M, G, n]. `now`: the newest position."""
    M, G, n = pages.shape
    p = kv.index(pages).flatten()
    pos = kv.pos.index_select(0, p).view(M, G, -1)  # [M, G, n S]; index_select is six times as fast as an index here
    mass = kv.mass.index_select(0, p).view(M, G, n, -1, kv.page_size).transpose(2, 3).flatten(-2)  # [M, G, C, n S]

    def read() -> tuple[Tensor, Tensor]:
        k, v = backend.read(kv, p)  # [M G n, S, D]
        return k.reshape(*pos.shape, -1), v.reshape(*pos.shape, -1)

    return View(pos, mass, now, read)


def slots(pages: Ints, places: Tensor, page_size: int) -> Tensor:
    """Slot numbers of places [M, G, n] in tables [M, G, pages], int32."""
    table = torch.from_numpy(pages).to(places.device, non_blocking=True)
    return table.gather(-1, places // page_size) * page_size + (places % page_size).int()


def punch(kv: KV, backend: ModuleType, pages: Ints, policy: Budget, now: int, used: Ints, n: int) -> Tensor:
    """Make holes of n slots of each head, out of the first `used` [M, G] of its table: slots [M, G, n]."""
    seen = view(kv, backend, pages, now)
    lists = (x.flatten(0, 1) for x in (policy.priority(seen), seen.pos, torch.from_numpy(used)))
    places = backend.lowest(*lists, *policy.between(now), n).view(*used.shape, n)
    gone = slots(pages, places, kv.page_size)
    kv.pos.view(-1)[gone.long()] = -1
    return gone


def divide(rank: Tensor, size: int, among: str) -> Tensor:
    """Tokens of each head, int64 [M, G], where the heads of a layer, or all, divide a sum of budgets by rank."""
    M, G, S = rank.shape
    groups = rank.view(M if among == "layer" else 1, -1)
    first = groups.shape[1] * torch.arange(len(groups), device=rank.device)
    best = groups.topk(size * M * G // len(groups)).indices + first[:, None]
    return torch.bincount(best.flatten() // S, minlength=M * G).view(M, G)


def compact(
    kv: KV,
    backend: ModuleType,
    pages: Ints,
    policy: Budget,
    now: int,
    sizes: Tensor | None = None,
    to: Ints | None = None,
) -> tuple[Ints, Tensor]:
    """Keep `sizes` [M, G] tokens of each head, or what the policy says, at the front of its table; behind are holes.

    Or at the front of another table, `to`; then what is in the first does not matter any more.

    How many tokens each head kept, [M, G], and the slots behind them, [M, G, interval].
    """
    seen, S = view(kv, backend, pages, now), kv.page_size
    rank = order(policy.priority(seen), seen.pos, *policy.between(now))
    if sizes is None:
        sizes = policy.sizes(seen) if policy.share == "none" else divide(rank, policy.size, policy.share)
    to, most, device = pages if to is None else to, int(sizes.max()), kv.device
    kept, places = sizes.to(device, non_blocking=True), torch.arange(most, device=device)
    mine = places < kept[..., None]  # [M, G, most]; the rest is padding: nobody's slot, onto itself
    stay = rank.topk(most).indices.masked_fill(~mine, pages.shape[2] * S).sort().values
    src = slots(pages, stay.clamp(max=pages.shape[2] * S - 1), S).masked_fill_(~mine, 0)
    dst = slots(to, places.expand_as(stay), S).masked_fill_(~mine, 0)
    backend.move(kv, src.flatten(0, 1), dst.flatten(0, 1))
    behind = (torch.arange(to.shape[2] * S, device=device) >= kept[..., None]).view(*to.shape, S)
    table = kv.index(to)  # [M, G, pages]; what is not owned is the trash page, which holds only holes anyway
    kv.pos[table] = kv.pos[table].masked_fill_(behind, -1)
    spare = kept[..., None] + torch.arange(policy.interval, device=device)
    return sizes.cpu().numpy().astype(np.int32), slots(to, spare, S)


def renumber(kv: KV, backend: ModuleType, pages: Ints, turn: Turn | None) -> None:
    """The tokens of each head get the positions 0, 1, ... in their order, and keys to go with them."""
    p = kv.index(pages)
    slot = (p[..., None] * kv.page_size + torch.arange(kv.page_size, device=kv.device)).flatten(2)  # [M, G, S]
    pos = kv.pos.view(-1)[slot]
    live = pos >= 0
    new = pos.masked_fill(~live, 2**31 - 1).argsort(-1).argsort(-1).int()
    if turn:
        k, v = (x.reshape(*pos.shape, -1)[live][:, None] for x in backend.read(kv, p.flatten()))  # [n, 1, D]
        mass = kv.mass.transpose(1, 2)[slot // kv.page_size, slot % kv.page_size][live]  # [n, C]
        s = slot[live]
        k = turn(k[:, 0], (new - pos)[live])[:, None]
        backend.write(kv, s[None].int(), k, v, new[live])  # a head of many tokens; masses are lost
        kv.mass.transpose(1, 2)[s // kv.page_size, s % kv.page_size] = mass
    kv.pos.view(-1)[slot[live]] = new[live]
