"""Operations on tables of pages: punch holes, compact, by the priorities of a policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retain.kernels.eviction_order import eviction_key
from retain.kernels.transfers import to_device
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.kv.memory.page_store import PageStore
from retain.types import Ints


@dataclass(frozen=True)
class Compaction:
    """What `compact` did: the tokens that each head kept, where they were, and the first holes behind them."""

    head_budgets: Ints  # [M, G]
    places: Tensor  # int64 [M, G, largest budget]: the old places, in their new order
    holes: Tensor  # int32 [M, G, interval]: slot numbers


@dataclass(frozen=True)
class Victims:
    """Slots that were turned into holes, all [M, G, n], the lowest priority first. K, V and mass are still in them."""

    places: Tensor  # in the tables, int64
    slots: Tensor  # int32
    pos: Tensor  # int32: the positions that they had; -1 for slots that were holes before


def build_view(
    store: PageStore,
    pages: Ints,
    query_position: int,
    slot_scores: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> CacheView:
    """Gather positions and mass of the slots in tables [M, G, n]; K and V are read when a policy needs them."""
    kv = store.kv
    M, G, n = pages.shape
    p = kv.to_index(pages).flatten()
    pos = kv.pos.index_select(0, p).view(M, G, -1)  # [M, G, n S]; index_select is six times as fast as indexing here
    mass = kv.mass.index_select(0, p).view(M, G, n, -1, kv.page_size).transpose(2, 3).flatten(-2)  # [M, G, C, n S]

    def read() -> tuple[Tensor, Tensor]:
        k, v = store.backend.read_slots(kv, p[:, None] * kv.page_size + torch.arange(kv.page_size, device=kv.device))
        return k.reshape(*pos.shape, -1), v.reshape(*pos.shape, -1)

    return CacheView(pos, mass, query_position, read, slot_scores=slot_scores, key_factors=key_factors)


def gather_slots(pages: Ints, places: Tensor, page_size: int) -> Tensor:
    """Return the slot numbers of places [M, G, n] in tables [M, G, pages], int32."""
    table = to_device(torch.from_numpy(pages), places.device)
    return table.gather(-1, places // page_size) * page_size + (places % page_size).int()


def punch(
    store: PageStore,
    pages: Ints,
    policy: BudgetPolicy,
    query_position: int,
    slots_used: Ints,
    n: int,
    slot_scores: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> Victims:
    """Turn the n lowest slots of each head into holes, among the first `slots_used` [M, G] of its table."""
    kv = store.kv
    view = build_view(store, pages, query_position, slot_scores, key_factors)
    priority = policy.priority(view).flatten(0, 1)
    pos = view.pos.flatten(0, 1)
    sinks, last_evictable = policy.evictable_range(query_position)
    lengths = torch.from_numpy(slots_used).flatten()
    places = store.backend.select_victims(priority, pos, lengths, sinks, last_evictable, n).view(*slots_used.shape, n)
    holes = gather_slots(pages, places, kv.page_size)
    victims = Victims(places, holes, kv.pos.view(-1)[holes.long()])
    kv.pos.view(-1)[holes.long()] = -1
    return victims


def allocate_budgets(rank: Tensor, budget: int, group_by: str) -> Tensor:
    """Divide the sum of the budgets of a layer's heads, or of all heads, by rank (AdaKV, arXiv 2407.11550).

    Returns the tokens of each head, int64 [M, G].
    """
    M, G, S = rank.shape
    groups = rank.view(M if group_by == "layer" else 1, -1)
    first = groups.shape[1] * torch.arange(len(groups), device=rank.device)
    best = groups.topk(budget * M * G // len(groups)).indices + first[:, None]
    return torch.bincount(best.flatten() // S, minlength=M * G).view(M, G)


def compact(
    store: PageStore,
    pages: Ints,
    policy: BudgetPolicy,
    query_position: int,
    head_budgets: Tensor | None = None,
    dst_pages: Ints | None = None,
    slot_scores: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> Compaction:
    """Move the highest slots of each head to the front of its table; the slots behind them become holes.

    `head_budgets` [M, G] is how many each head keeps; None: the policy decides. With `dst_pages` they move to the front
    of another table, and the content of the first means nothing afterwards.
    """
    kv = store.kv
    view = build_view(store, pages, query_position, slot_scores, key_factors)
    S = kv.page_size
    device = kv.device
    rank = eviction_key(policy.priority(view), view.pos, *policy.evictable_range(query_position))
    if head_budgets is None and policy.share == "none":
        head_budgets = policy.head_budgets(view)
    elif head_budgets is None:
        head_budgets = allocate_budgets(rank, policy.budget_tokens, policy.share)
    dst_pages = pages if dst_pages is None else dst_pages
    largest = int(head_budgets.max())
    kept = to_device(head_budgets, device)
    places = torch.arange(largest, device=device)
    used = places < kept[..., None]  # [M, G, largest]; the rest is padding: slot 0 moves onto itself
    stay = rank.topk(largest).indices.masked_fill(~used, pages.shape[2] * S).sort().values
    src = gather_slots(pages, stay.clamp(max=pages.shape[2] * S - 1), S).masked_fill_(~used, 0)
    dst = gather_slots(dst_pages, places.expand_as(stay), S).masked_fill_(~used, 0)
    store.backend.move(kv, src.flatten(0, 1), dst.flatten(0, 1))
    behind = (torch.arange(dst_pages.shape[2] * S, device=device) >= kept[..., None]).view(*dst_pages.shape, S)
    table = kv.to_index(dst_pages)  # [M, G, pages]; entries beyond a head's pages are the trash page, all holes
    kv.pos[table] = kv.pos[table].masked_fill_(behind, -1)
    holes = kept[..., None] + torch.arange(policy.interval, device=device)
    return Compaction(head_budgets.cpu().numpy().astype(np.int32), stay, gather_slots(dst_pages, holes, S))
