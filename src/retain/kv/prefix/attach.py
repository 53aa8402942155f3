"""How a row begins with what is there: shared pages, copies, and pages that others fill.

Whole pages of the tree are shared; a page of which only a part is wanted is copied, and so is what will be written
over: the windows of sliding layers, and everything of a row that forgets. What sleeps gets pages of the row's own, all
holes until it comes. What is not known here: how any of it was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import NO_WINDOW
from retain.kv.eviction.policies import Policy
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.offload.span import ReadJob, SpanRange

if TYPE_CHECKING:
    from retain.kv.memory.cache import Cache

Ints = NDArray[np.int32]
EXTRA_TABLE_PAGES = (
    16  # pages that a table has beyond its texts': what is chosen from comes with its spans' other tokens
)
NO_PAGES: Ints = np.zeros((0, 0), np.int32)


@dataclass(frozen=True)
class AttachPlan:
    """`length` tokens that a row can begin with: pages of the tree, then what sleeps, for layers that see everything;
    for sliding ones windows of the tree, or those that sleep.
    """

    length: int
    pages: Ints  # [M, G, n]
    sliding_windows: SlidingWindows | None
    span_ranges: Sequence[SpanRange] = ()
    offloaded_windows: SpanRange | None = None
    selective: bool = False  # of what sleeps only some will come: there are pages for all rows of its spans


@dataclass(frozen=True)
class PageSource:
    """n pages of every head of a layer, from page `first` of the text on: copies of `src` [G, n], or, where it is
    empty, what comes from rows of a layer of spans: (part, layer, row, how many), one behind the other.
    """

    layer: int
    first_page: int
    num_pages: int
    src_pages: Ints
    offloaded: Sequence[tuple[SpanRange, int, int, int]] = ()


def fork(cache: Cache, row: int, policy: Policy, num_computed_tokens: int) -> int | None:
    """See Cache.fork: a row is free."""
    new = cache.open(policy, num_computed_tokens)
    rings = cache.window[new] < NO_WINDOW
    cache.capacity[new, rings], cache.ring_base[new, rings] = cache.capacity[row, rings], cache.ring_base[row, rings]
    shared = np.zeros_like(cache.counts[row])  # [L, G]
    if row not in cache.evictors and new not in cache.evictors:
        shared[~rings] = num_computed_tokens // cache.page_size
    places = np.arange(cache.pages.shape[3])
    both = places < shared[..., None]  # [L, G, n]
    cache.pool.incref(cache.pages[row][both])
    cache.pages[new][both], cache.counts[new] = cache.pages[row][both], shared
    if not cache.reserve(new, num_computed_tokens):
        cache.close(new)
        return None
    cache.peak_counts[new] = np.maximum(cache.peak_counts[new], cache.counts[new])
    held = (places < np.minimum(cache.counts[new], cache.counts[row])[..., None]) & ~both
    cache.backend.copy(cache.kv, *(cache.kv.to_index(cache.pages[r][held]) for r in (row, new)))
    return new


def attach_pages(cache: Cache, row: int, plan: AttachPlan, must_copy: bool) -> dict[int, list[ReadJob]] | None:
    """Put a beginning into a row's tables. What is to come, for each layer; None where there are too few pages."""
    S, G, had = cache.page_size, cache.spec.kv_heads, plan.pages.shape[-1]
    shared = 0 if must_copy else min(plan.length // S, had)
    pieces = list(_page_sources(cache, row, plan, shared))
    src = np.concatenate([NO_PAGES.ravel(), *(p.src_pages.ravel() for p in pieces)])
    held = np.concatenate([plan.pages[..., :shared].ravel(), src])
    n = sum(p.num_pages for p in pieces) * G
    cache.pool.incref(held)  # nobody may evict them now
    if not cache.pool.ensure_free(n):
        cache.pool.free(held)
        return None
    cache.ring_base[row] = [_first_visible_page(plan.length, w, S) * S for w in cache.window[row].tolist()]
    cache.pages[row, cache.window[row] == NO_WINDOW, :, :shared] = plan.pages[..., :shared]
    cache.counts[row, cache.window[row] == NO_WINDOW] = shared
    fresh = taken = np.sort(cache.pool.allocate(n))
    cache.kv.pos[cache.kv.to_index(taken)] = -1
    dst, jobs = [NO_PAGES], dict[int, list[ReadJob]]()
    for p in pieces:
        mine, taken = np.split(taken, [p.num_pages * G])
        pages = mine.reshape(G, p.num_pages)
        at = p.first_page - int(cache.ring_base[row, p.layer]) // S
        cache.pages[row, p.layer, :, at : at + p.num_pages] = pages
        cache.counts[row, p.layer] = at + p.num_pages
        if p.src_pages.size:
            dst.append(pages)
        ends = accumulate((k for *_, k in p.offloaded), initial=0)
        for (part, layer, skip, k), i in zip(p.offloaded, ends, strict=False):
            job = ReadJob(part.store, part.span, layer, skip, pages[:, i : i + k].T, (p.first_page + i) * S)
            jobs.setdefault(p.layer, []).append(job)
    _copy_pages(cache, src, np.concatenate([d.ravel() for d in dst]), plan.length)
    cache.kv.mass[cache.kv.to_index(fresh)] = 0
    cache.pool.free(src)
    cache.peak_counts[row] = cache.counts[row]
    cache.device_tables.mark_dirty(row)
    cache.allocated_upto[row] = plan.length
    return jobs


def remove_pages(cache: Cache, row: int, layer: int, start: int, end: int) -> None:
    """Pages of a row's tables of a layer, from place `begin` to `end`, go back; those behind them move up."""
    n, pages = int(cache.counts[row, layer, 0]), cache.pages[row, layer]
    if end > start:
        gone = pages[:, start:end].flatten()  # a copy, whatever its shape
        pages[:, start : n - end + start] = pages[:, end:n].copy()
        cache.counts[row, layer] -= end - start
        cache.device_tables.mark_dirty(row)
        cache.ring_base[row, layer] += (end - start) * cache.page_size
        cache.pool.free(gone)


def _page_sources(cache: Cache, row: int, plan: AttachPlan, num_shared: int) -> Iterator[PageSource]:
    """All pages of the row that are not shared."""
    S, had, last = cache.page_size, plan.pages.shape[-1], -(-plan.length // cache.page_size)
    for m, layer in enumerate(np.flatnonzero(cache.window[row] == NO_WINDOW).tolist()):
        if had > num_shared:
            yield PageSource(layer, num_shared, had - num_shared, plan.pages[m, :, num_shared:])
        if plan.selective:
            yield PageSource(layer, had, sum(len(p.span.keys) for p in plan.span_ranges), NO_PAGES)
        elif last > had:
            asleep = [(p, m, p.begin, p.end - p.begin) for p in plan.span_ranges]
            yield PageSource(layer, had, last - had, NO_PAGES, asleep)
    for i, layer in enumerate(np.flatnonzero(cache.window[row] < NO_WINDOW).tolist()):
        first = _first_visible_page(plan.length, int(cache.window[row, layer]), S)
        if plan.offloaded_windows:
            asleep = [(plan.offloaded_windows, i, first - plan.offloaded_windows.span.window_starts[i], last - first)]
            yield PageSource(layer, first, last - first, NO_PAGES, asleep)
        elif plan.sliding_windows:
            at = plan.sliding_windows.first_pages[i]
            yield PageSource(layer, first, last - first, plan.sliding_windows.pages[i][:, first - at : last - at])


def _first_visible_page(end: int, window: int, page_size: int) -> int:
    """The page with the oldest token that somebody at `end` sees."""
    return max(end - window + 1, 0) // page_size


def _copy_pages(cache: Cache, src: Ints, dst: Ints, end: int) -> None:
    """Tokens from position `end` on are left out."""
    to = cache.kv.to_index(dst)
    cache.backend.copy(cache.kv, cache.kv.to_index(src), to)
    pos = cache.kv.pos[to]
    cache.kv.pos[to] = pos.masked_fill_(pos >= end, -1)
