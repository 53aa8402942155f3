"""What every page of a pool is for, right now, and what was forgotten: for people and their dashboards.

What is not known here: requests, who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retain.kernels import NO_WINDOW
from retain.kv import policies
from retain.kv.policies import Policy

if TYPE_CHECKING:
    from retain.kv.cache import Cache

# What a page is: nobody's; kept for those who begin alike; a row's, in a layer that keeps everything, slides, or has a
# budget; held by more than one table.
STATES = ("free", "cached", "full", "ring", "budgeted", "shared")
Kinds = NDArray[np.int8]


@dataclass(frozen=True)
class Census:
    """Slots by state, holes apart, and the bytes of one page; tiers as they tell of themselves."""

    slots: dict[str, int]
    holes: int
    page_bytes: int
    pages: dict[str, int]
    prefixes: dict[str, int]  # tokens that began with what was there, since the start: by where it was
    tiers: list[dict[str, Any]]


def kinds(cache: Cache) -> tuple[Kinds, NDArray[np.int32]]:
    """Which of STATES every page is in, int8 [P], and whose row it is in, int32 [P]; -1: nobody's or the tree's."""
    state = np.zeros(cache.pool.n_pages, np.int8)
    owner = np.full(cache.pool.n_pages, -1, np.int32)
    if cache.reuse:
        state[cache.reuse.tree.mine] = STATES.index("cached")
    places = np.arange(cache.pages.shape[3])
    for row in sorted(set(range(len(cache.paid))) - set(cache.rows)):
        owned = places < cache.counts[row][..., None]  # [L, G, n]
        budget = STATES.index("budgeted" if row in cache.keepers else "full")
        layer = np.where(cache.window[row] < NO_WINDOW, STATES.index("ring"), budget)  # [L]
        pages = cache.pages[row][owned]
        state[pages] = np.broadcast_to(layer[:, None, None], owned.shape)[owned]
        owner[pages] = row
        if row in cache.keepers:
            besides = cache.keepers[row].besides()
            state[besides], owner[besides] = STATES.index("budgeted"), row
    state[cache.pool.refs > 1] = STATES.index("shared")
    return state, owner


def census(cache: Cache) -> Census:
    """Between two steps."""
    state, _ = kinds(cache)
    S, used = cache.page_size, (np.flatnonzero(state[1:]) + 1).astype(np.int32)  # page 0 is nobody's
    holes = (cache.kv.pos[cache.kv.index(used)] < 0).sum(-1).cpu().numpy() if len(used) else np.zeros(0, np.int64)
    pages = np.bincount(state[1:], minlength=len(STATES))
    slots = pages * S
    slots -= np.bincount(state[used], holes, len(STATES)).astype(slots.dtype)
    prefixes, tiers = {"pool": 0}, []
    if cache.reuse:
        woken = dict(cache.reuse.sleep.woken) if cache.reuse.sleep else {}
        prefixes = {"pool": cache.reuse.resumed - sum(woken.values()), **woken}
        tiers = cache.reuse.sleep.told() if cache.reuse.sleep else []
    by = dict(zip(STATES, pages.tolist(), strict=True))
    return Census(
        dict(zip(STATES, slots.tolist(), strict=True)), int(holes.sum()), cache.page_bytes, by, prefixes, tiers
    )


def forgotten(cache: Cache) -> dict[str, int]:
    """Slots that budgets have forgotten since the start, by policy."""
    found = cache.forgotten.copy()
    for keeper in cache.keepers.values():
        found[policies.named_by(keeper.policy)] += keeper.forgot
    return dict(found)


def slid(cache: Cache, policy: Policy, length: int) -> int:
    """Slots that rings have written over in a text of so many tokens."""
    windows = cache.windows(policy)
    return int(np.maximum(length - windows[windows < NO_WINDOW], 0).sum()) * cache.shape.kv_heads
