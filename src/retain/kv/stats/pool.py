"""What every page of a pool is for, right now, and what was forgotten: for people and their dashboards.

What is not known here: requests, who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import NO_WINDOW
from retain.kv.eviction import policies
from retain.kv.eviction.policies import Policy

if TYPE_CHECKING:
    from retain.kv.memory.cache import Cache

# What a page is: nobody's; kept for those who begin alike; a row's, in a layer that keeps everything, slides, or has a
# budget; held by more than one table.
PAGE_STATES = ("free", "cached", "full", "ring", "budgeted", "shared")
PageStates = NDArray[np.int8]


@dataclass(frozen=True)
class PoolStats:
    """Slots by state, holes apart, and the bytes of one page; tiers as they tell of themselves."""

    slots_by_state: dict[str, int]
    num_holes: int
    page_bytes: int
    pages_by_state: dict[str, int]
    prefix_hit_tokens: dict[str, int]  # tokens that began with what was there, since the start: by where it was
    tier_stats: list[dict[str, Any]]


def classify_pages(cache: Cache) -> tuple[PageStates, NDArray[np.int32]]:
    """Which of STATES every page is in, int8 [P], and whose row it is in, int32 [P]; -1: nobody's or the tree's."""
    state = np.zeros(cache.pool.num_pages, np.int8)
    owner = np.full(cache.pool.num_pages, -1, np.int32)
    if cache.prefix_cache:
        state[cache.prefix_cache.tree.owned_mask] = PAGE_STATES.index("cached")
    places = np.arange(cache.pages.shape[3])
    for row in sorted(set(range(len(cache.allocated_upto))) - set(cache.free_row_ids)):
        owned = places < cache.counts[row][..., None]  # [L, G, n]
        budget = PAGE_STATES.index("budgeted" if row in cache.evictors else "full")
        layer = np.where(cache.window[row] < NO_WINDOW, PAGE_STATES.index("ring"), budget)  # [L]
        pages = cache.pages[row][owned]
        state[pages] = np.broadcast_to(layer[:, None, None], owned.shape)[owned]
        owner[pages] = row
        if row in cache.evictors:
            besides = cache.evictors[row].extra_pages()
            state[besides], owner[besides] = PAGE_STATES.index("budgeted"), row
    state[cache.pool.ref_counts > 1] = PAGE_STATES.index("shared")
    return state, owner


def collect_pool_stats(cache: Cache) -> PoolStats:
    """Between two steps."""
    state, _ = classify_pages(cache)
    S, used = cache.page_size, (np.flatnonzero(state[1:]) + 1).astype(np.int32)  # page 0 is nobody's
    holes = (cache.kv.pos[cache.kv.to_index(used)] < 0).sum(-1).cpu().numpy() if len(used) else np.zeros(0, np.int64)
    pages = np.bincount(state[1:], minlength=len(PAGE_STATES))
    slots = pages * S
    slots -= np.bincount(state[used], holes, len(PAGE_STATES)).astype(slots.dtype)
    prefixes, tiers = {"pool": 0}, []
    if cache.prefix_cache:
        woken = dict(cache.prefix_cache.offloader.num_loaded_tokens) if cache.prefix_cache.offloader else {}
        prefixes = {"pool": cache.prefix_cache.num_reused_tokens - sum(woken.values()), **woken}
        tiers = cache.prefix_cache.offloader.stats() if cache.prefix_cache.offloader else []
    by = dict(zip(PAGE_STATES, pages.tolist(), strict=True))
    return PoolStats(
        dict(zip(PAGE_STATES, slots.tolist(), strict=True)), int(holes.sum()), cache.page_bytes, by, prefixes, tiers
    )


def count_evicted_slots(cache: Cache) -> dict[str, int]:
    """Slots that budgets have forgotten since the start, by policy."""
    found = cache.evicted_slots.copy()
    for keeper in cache.evictors.values():
        found[policies.name_of(keeper.policy)] += keeper.num_evicted
    return dict(found)


def count_ring_overwrites(cache: Cache, policy: Policy, num_tokens: int) -> int:
    """Slots that rings have written over in a text of so many tokens."""
    windows = cache.windows(policy)
    return int(np.maximum(num_tokens - windows[windows < NO_WINDOW], 0).sum()) * cache.spec.kv_heads
