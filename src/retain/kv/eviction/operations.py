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

from retain.kernels.api import KV
from retain.kernels.eviction_order import eviction_key
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView

Ints = NDArray[np.int32]
ShiftKeys = Callable[[Tensor, Tensor], Tensor]  # keys [n, D] as cached, by how many positions [n] -> the same elsewhere


def build_view(kv: KV, backend: ModuleType, pages: Ints, query_position: int) -> CacheView:
    """What there is in tables [M, G, n]. `now`: the newest position."""
    M, G, n = pages.shape
    p = kv.to_index(pages).flatten()
    pos = kv.pos.index_select(0, p).view(M, G, -1)  # [M, G, n S]; index_select is six times as fast as an index here
    mass = kv.mass.index_select(0, p).view(M, G, n, -1, kv.page_size).transpose(2, 3).flatten(-2)  # [M, G, C, n S]

    def read() -> tuple[Tensor, Tensor]:
        k, v = backend.read(kv, p)  # [M G n, S, D]
        return k.reshape(*pos.shape, -1), v.reshape(*pos.shape, -1)

    return CacheView(pos, mass, query_position, read)


def gather_slots(pages: Ints, indices: Tensor, page_size: int) -> Tensor:
    """Slot numbers of places [M, G, n] in tables [M, G, pages], int32."""
    table = torch.from_numpy(pages).to(indices.device, non_blocking=True)
    return table.gather(-1, indices // page_size) * page_size + (indices % page_size).int()


def punch(
    kv: KV, backend: ModuleType, pages: Ints, policy: BudgetPolicy, query_position: int, slots_used: Ints, n: int
) -> Tensor:
    """Make holes of n slots of each head, out of the first `used` [M, G] of its table: slots [M, G, n]."""
    seen = build_view(kv, backend, pages, query_position)
    lists = (x.flatten(0, 1) for x in (policy.priority(seen), seen.pos, torch.from_numpy(slots_used)))
    places = backend.select_victims(*lists, *policy.evictable_range(query_position), n).view(*slots_used.shape, n)
    gone = gather_slots(pages, places, kv.page_size)
    kv.pos.view(-1)[gone.long()] = -1
    return gone


def allocate_budgets(rank: Tensor, budget: int, group_by: str) -> Tensor:
    """Tokens of each head, int64 [M, G], where the heads of a layer, or all, divide a sum of budgets by rank."""
    M, G, S = rank.shape
    groups = rank.view(M if group_by == "layer" else 1, -1)
    first = groups.shape[1] * torch.arange(len(groups), device=rank.device)
    best = groups.topk(budget * M * G // len(groups)).indices + first[:, None]
    return torch.bincount(best.flatten() // S, minlength=M * G).view(M, G)


def compact(
    kv: KV,
    backend: ModuleType,
    pages: Ints,
    policy: BudgetPolicy,
    query_position: int,
    head_budgets: Tensor | None = None,
    dst_pages: Ints | None = None,
) -> tuple[Ints, Tensor]:
    """Keep `sizes` [M, G] tokens of each head, or what the policy says, at the front of its table; behind are holes.

    Or at the front of another table, `to`; then what is in the first does not matter any more.

    How many tokens each head kept, [M, G], and the slots behind them, [M, G, interval].
    """
    seen, S = build_view(kv, backend, pages, query_position), kv.page_size
    rank = eviction_key(policy.priority(seen), seen.pos, *policy.evictable_range(query_position))
    if head_budgets is None:
        head_budgets = (
            policy.head_budgets(seen)
            if policy.share == "none"
            else allocate_budgets(rank, policy.budget_tokens, policy.share)
        )
    dst_pages, most, device = pages if dst_pages is None else dst_pages, int(head_budgets.max()), kv.device
    kept, places = head_budgets.to(device, non_blocking=True), torch.arange(most, device=device)
    mine = places < kept[..., None]  # [M, G, most]; the rest is padding: nobody's slot, onto itself
    stay = rank.topk(most).indices.masked_fill(~mine, pages.shape[2] * S).sort().values
    src = gather_slots(pages, stay.clamp(max=pages.shape[2] * S - 1), S).masked_fill_(~mine, 0)
    dst = gather_slots(dst_pages, places.expand_as(stay), S).masked_fill_(~mine, 0)
    backend.move(kv, src.flatten(0, 1), dst.flatten(0, 1))
    behind = (torch.arange(dst_pages.shape[2] * S, device=device) >= kept[..., None]).view(*dst_pages.shape, S)
    table = kv.to_index(dst_pages)  # [M, G, pages]; what is not owned is the trash page, which holds only holes anyway
    kv.pos[table] = kv.pos[table].masked_fill_(behind, -1)
    spare = kept[..., None] + torch.arange(policy.interval, device=device)
    return head_budgets.cpu().numpy().astype(np.int32), gather_slots(dst_pages, spare, S)


def renumber(kv: KV, backend: ModuleType, pages: Ints, shift_keys: ShiftKeys | None) -> None:
    """The tokens of each head get the positions 0, 1, ... in their order, and keys to go with them."""
    p = kv.to_index(pages)
    slot = (p[..., None] * kv.page_size + torch.arange(kv.page_size, device=kv.device)).flatten(2)  # [M, G, S]
    pos = kv.pos.view(-1)[slot]
    live = pos >= 0
    new = pos.masked_fill(~live, 2**31 - 1).argsort(-1).argsort(-1).int()
    if shift_keys:
        k, v = (x.reshape(*pos.shape, -1)[live][:, None] for x in backend.read(kv, p.flatten()))  # [n, 1, D]
        mass = kv.mass.transpose(1, 2)[slot // kv.page_size, slot % kv.page_size][live]  # [n, C]
        s = slot[live]
        k = shift_keys(k[:, 0], (new - pos)[live])[:, None]
        backend.write(kv, s[None].int(), k, v, new[live])  # a head of many tokens; masses are lost
        kv.mass.transpose(1, 2)[s // kv.page_size, s % kv.page_size] = mass
    kv.pos.view(-1)[slot[live]] = new[live]
