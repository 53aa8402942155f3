"""Operations on the tables of rows: punch holes, compact, by the priorities of policies.

Rows that evict in the same step are evicted together, by one call over all of them. Only `EvictionPolicy.priority` is
called row by row: it depends on the row's own sizes, and may add numbers over all slots of a row, in an order of its
own. So a row keeps the same tokens in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.slots.eviction_order import LAST_POSITION, eviction_key, protect
from retain.kernels.transfers import to_device
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.kv.memory.page_store import PageStore
from retain.types import Ints


@dataclass(frozen=True)
class EvictingRow:
    """What ranks the slots of one row, whose largest head has `num_pages` pages."""

    policy: BudgetPolicy
    query_position: int  # the newest position
    num_pages: int
    slot_scores: Tensor | None  # float32 [M, G, S]


@dataclass(frozen=True)
class RowTables:
    """Tables of B rows in M layers whose slots have one size. Entries beyond the pages of a head are the trash page."""

    store: PageStore
    pages: Tensor  # int64 [B, M, G, n], on the device
    rows: Sequence[EvictingRow]
    key_factors: Tensor | None = None  # float32 [M, G, 1, D]

    def pages_of(self, b: int) -> Tensor:
        """Return the tables of one row, int64 [M, G, pages]."""
        return self.pages[b, :, :, : self.rows[b].num_pages]

    def of_row(self, b: int) -> RowTables:
        """Return the tables of one row alone."""
        return replace(self, pages=self.pages_of(b)[None], rows=[self.rows[b]])


@dataclass(frozen=True)
class RankedSlots:
    """The slots of tables: `pos` int32 and `priority` float32 [B, M, G, S], and a view of each row."""

    pos: Tensor
    priority: Tensor
    evictable: tuple[Tensor, Tensor]  # int64 [B, 1, 1, 1]: the first and last position that is not protected
    views: Sequence[CacheView]

    @property
    def keys(self) -> Tensor:
        """Keys by which slots are evicted, the lowest first, int64 [B, M, G, S]; see eviction_order.py."""
        return eviction_key(self.priority, self.pos, *self.evictable)


@dataclass(frozen=True)
class Compaction:
    """What `compact` did: the tokens that each head kept, where they were, and the first holes behind them."""

    head_budgets: Ints  # [B, M, G]
    places: Tensor  # int64 [B, M, G, largest budget]: the old places, in their new order
    holes: Tensor  # int32 [B, M, G, holes]: slot numbers


@dataclass(frozen=True)
class Victims:
    """Slots that were turned into holes, all [..., M, G, n], the lowest priority first. K, V and mass are in them."""

    places: Tensor  # in the tables, int64
    slots: Tensor  # int32
    pos: Tensor  # int32: the positions that they had; -1 for slots that were holes before

    def of_row(self, b: int) -> Victims:
        """Return the victims of one row alone."""
        return Victims(self.places[b], self.slots[b], self.pos[b])


def rank_slots(tables: RowTables) -> RankedSlots:
    """Gather positions and masses of all slots in tables, and let each row's policy rank its own.

    K and V are read when a policy needs them.
    """
    kv = tables.store.kv
    B, M, G, n = tables.pages.shape
    S = kv.page_size
    p = tables.pages.flatten()
    pos = kv.pos.index_select(0, p).view(B, M, G, -1)  # index_select is six times as fast as indexing here
    mass = kv.mass.index_select(0, p).view(B, M, G, n, -1, S).transpose(3, 4).flatten(-2)  # [B, M, G, C, n S]
    views = [
        CacheView(
            pos[b, ..., : row.num_pages * S].contiguous(),
            mass[b, ..., : row.num_pages * S].contiguous(),
            row.query_position,
            partial(_read_pages, tables.store, tables.pages_of(b)),
            slot_scores=row.slot_scores,
            key_factors=tables.key_factors,
        )
        for b, row in enumerate(tables.rows)
    ]
    priorities = [row.policy.priority(view).float() for row, view in zip(tables.rows, views, strict=True)]
    ranges = [row.policy.evictable_range(row.query_position) for row in tables.rows]
    bounds = to_device(torch.tensor(ranges), kv.device)[..., None, None, None]  # [B, 2, 1, 1, 1]
    padded = torch.stack([F.pad(x, (0, n * S - x.shape[-1])) for x in priorities])
    return RankedSlots(pos, padded, (bounds[:, 0], bounds[:, 1]), views)


def _read_pages(store: PageStore, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Read keys [M, G, S, D] and values [M, G, S, v_dim] of tables [M, G, pages], float32."""
    slots = pages[..., None] * store.page_size + torch.arange(store.page_size, device=pages.device)
    return store.read(slots.flatten(2))


def gather_slots(pages: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Return the slot numbers of places [..., n] in tables [..., pages], int32."""
    return (pages.gather(-1, places // page_size) * page_size + places % page_size).int()


def punch(tables: RowTables, slots_used: Ints, n: int) -> Victims:
    """Turn the n lowest slots of each head into holes, among the first `slots_used` [B, M, G] of its table."""
    kv = tables.store.kv
    ranked = rank_slots(tables)
    priority = protect(ranked.priority, ranked.pos, *ranked.evictable)
    lengths = torch.from_numpy(slots_used).flatten()
    lists = priority.flatten(0, 2), ranked.pos.flatten(0, 2)
    places = tables.store.backend.select_victims(*lists, lengths, 0, LAST_POSITION, n).view(*slots_used.shape, n)
    holes = gather_slots(tables.pages, places, kv.page_size)
    victims = Victims(places, holes, kv.pos.view(-1)[holes.long()])
    kv.pos.view(-1)[holes.long()] = -1
    return victims


def allocate_budgets(rank: Tensor, budget: int, share: str) -> Tensor:
    """Divide the sum of the budgets of a layer's heads, or of all heads, by rank (AdaKV, arXiv 2407.11550).

    Returns the tokens of each head, int64 [M, G].
    """
    M, G, S = rank.shape
    lists = rank.reshape(M if share == "layer" else 1, -1)  # of heads that share
    first = lists.shape[1] * torch.arange(len(lists), device=rank.device)
    best = lists.topk(budget * M * G // len(lists)).indices + first[:, None]
    return torch.bincount(best.flatten() // S, minlength=M * G).view(M, G)


def compact(
    tables: RowTables,
    head_budgets: Sequence[Tensor | None],
    num_holes: int,
    dst_pages: Tensor | None = None,
    before_move: Callable[[Tensor, Tensor], None] | None = None,
) -> Compaction:
    """Move the highest slots of each head to the front of its table; the slots behind them become holes.

    `head_budgets` [M, G] of each row are how many each head keeps; None: the policy decides. `num_holes`: slots behind
    them that are returned. With `dst_pages` [B, M, G, pages] they move to the front of other tables; the pages of
    `tables` are undefined then. `before_move` is called with the places [B, M, G, n] of what each head keeps, and which
    of these entries are used.
    """
    kv = tables.store.kv
    S = kv.page_size
    device = kv.device
    ranked = rank_slots(tables)
    rank = ranked.keys
    num_slots = rank.shape[-1]
    chosen = [
        given
        if given is not None
        else choose_budgets(row.policy, rank[b, ..., : row.num_pages * S], ranked.views[b], row.policy.budget_tokens)
        for b, (given, row) in enumerate(zip(head_budgets, tables.rows, strict=True))
    ]
    budgets = torch.stack([x.cpu() for x in chosen])  # [B, M, G]
    dst_pages = tables.pages if dst_pages is None else dst_pages
    largest = int(budgets.max())
    kept = to_device(budgets, device)
    places = torch.arange(largest, device=device)
    used = places < kept[..., None]  # [B, M, G, largest]; the rest is padding: slot 0 moves onto itself
    stay = rank.topk(largest).indices.masked_fill(~used, num_slots).sort().values
    if before_move:
        before_move(stay, used)
    src = gather_slots(tables.pages, stay.clamp(max=num_slots - 1), S).masked_fill_(~used, 0)
    dst = gather_slots(dst_pages, places.expand_as(stay), S).masked_fill_(~used, 0)
    tables.store.backend.move(kv, src.flatten(0, 2), dst.flatten(0, 2))
    behind = (torch.arange(dst_pages.shape[-1] * S, device=device) >= kept[..., None]).view(*dst_pages.shape, S)
    kv.pos[dst_pages] = kv.pos[dst_pages].masked_fill_(behind, -1)  # the trash page has holes only
    holes = kept[..., None] + torch.arange(num_holes, device=device)
    return Compaction(budgets.numpy().astype(np.int32), stay, gather_slots(dst_pages, holes, S))


def write_values(store: PageStore, pages: Tensor, num_kept: Ints, values: Sequence[Tensor]) -> None:
    """Write values [G, n, V] of each layer into the first `num_kept` [M, G] slots of tables [M, G, pages]."""
    kv = store.kv
    for m, by_head in enumerate(values):
        for g, v in enumerate(by_head):
            n = int(num_kept[m, g])
            slots = gather_slots(pages[m, g], torch.arange(n, device=kv.device), kv.page_size)
            index = slots.long()
            k, _ = store.read(index)
            pos = kv.pos.view(-1)[index]
            page = index // kv.page_size
            place = index % kv.page_size
            mass = kv.mass.transpose(1, 2)[page, place]
            store.backend.write(kv, slots[None], k[:, None], v[:n, None].contiguous(), pos)
            kv.mass.transpose(1, 2)[page, place] = mass  # a backend writes fresh tokens, which have none


def choose_budgets(policy: BudgetPolicy, rank: Tensor, view: CacheView, budget: int) -> Tensor:
    """Return the tokens that each head of one row keeps where their budget is so many, int64 [M, G]."""
    if policy.share in ("layer", "all"):
        return policy.kv_heads.select(allocate_budgets(policy.kv_heads.gather(rank), budget, policy.share))
    return policy.head_budgets(view, budget)
