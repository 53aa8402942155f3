"""Statistics of the pool: the use of every page between two steps."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import NO_WINDOW
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints

# free; held by the prefix cache only; in a row's unwindowed layer, sliding layer, layer with a budget, or layer without
# attention; in several tables at once
PAGE_STATES = ("free", "cached", "full", "ring", "budgeted", "state", "shared")
PageStates = NDArray[np.int8]


@dataclass(frozen=True)
class PoolStats:
    """Slots and pages by state, without the trash page."""

    slots_by_state: dict[str, int]  # without holes
    num_holes: int
    page_bytes: int
    pages_by_state: dict[str, int]
    prefix_hit_tokens: dict[str, int]  # tokens that requests began with, by where they were
    tier_stats: list[dict[str, Any]]
    num_queried_tokens: int = 0  # of texts that were looked up in the prefix cache
    num_checkpoints: int = 0  # of the prefix cache
    num_checkpoint_pages: int = 0  # that they hold; each counts once
    looked_slots: dict[str, int] = field(default_factory=dict)  # of a pool in a file, by where they were


def classify_pages(
    groups: Sequence[BlockTables],
    num_holders: Ints,
    extra_pages: Mapping[int, Ints],
    evicting: Container[int],
) -> tuple[PageStates, Ints]:
    """Return the state of every page, int8 [P], and the row that holds it, int32 [P]; -1 for none or the prefix cache.

    `num_holders`: how often the prefix cache holds each page. `extra_pages`: those that each open row holds beside its
    tables. `evicting`: rows with a budget.
    """
    pool = groups[0].pool
    state = np.zeros(pool.num_pages, np.int8)
    owner = np.full(pool.num_pages, -1, np.int32)
    state[num_holders > 0] = PAGE_STATES.index("cached")
    for t, row in [(tables, row) for tables in groups for row in tables.open_rows]:
        owned = t.owned(row)  # [L, G, n]
        unwindowed = PAGE_STATES.index("budgeted" if row in evicting else "full")
        windowed = PAGE_STATES.index("state" if t.is_state else "ring")
        by_layer = np.where(t.window[row] < NO_WINDOW, windowed, unwindowed)  # [L]
        pages = t.pages[row][owned]
        state[pages] = np.broadcast_to(by_layer[:, None, None], owned.shape)[owned]
        owner[pages] = row
        for pages in [extra_pages[row], *([t.demoted.page_list(row)] if t.demoted else [])]:
            state[pages] = unwindowed
            owner[pages] = row
    state[pool.ref_counts > np.maximum(num_holders, 1)] = PAGE_STATES.index("shared")
    return state, owner


def count_slots(tables: BlockTables, state: PageStates) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the slots and the pages in each state that `classify_pages` found, and the number of holes.

    `tables` are the first group's.
    """
    kv = tables.kv
    used = (np.flatnonzero(state[1:]) + 1).astype(np.int32)
    holes = (kv.pos[kv.to_index(used)] < 0).sum(-1).cpu().numpy() if len(used) else np.zeros(0, np.int64)
    num_holes = int(holes.sum())
    for other in tables.store.others.values():  # pages of fewer bits have more slots, and positions elsewhere
        is_other = tables.pool.kinds[used] == other.kind
        live = (other.kv.pos[kv.to_index(used[is_other])] >= 0).sum(-1).numpy()
        num_holes += int((other.page_size - live - holes[is_other]).sum())
        holes[is_other] = tables.page_size - live
    pages = np.bincount(state[1:], minlength=len(PAGE_STATES))
    slots = pages * tables.page_size
    slots -= np.bincount(state[used], holes, len(PAGE_STATES)).astype(slots.dtype)
    slots_by_state: dict[str, int] = dict(zip(PAGE_STATES, slots.tolist(), strict=True))
    pages_by_state: dict[str, int] = dict(zip(PAGE_STATES, pages.tolist(), strict=True))
    return slots_by_state, pages_by_state, num_holes
