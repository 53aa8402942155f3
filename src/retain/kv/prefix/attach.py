"""Attaching a prefix to a row: shared pages, copied pages, and pages that a loader fills.

Whole pages of the radix tree are shared. A page of which only a part matches is copied, and so is every page that will
be written over: the windows of sliding layers, and all pages of a row that evicts. An offloaded prefix gets pages of
the row's own, all holes until its blocks are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.offload.span import ReadJob, SpanRange
from retain.types import Ints

NO_PAGES: Ints = np.zeros((0, 0), np.int32)


@dataclass(frozen=True)
class AttachPlan:
    """What a row can begin with: `length` tokens, in pages of the tree, then in offloaded spans.

    Sliding layers resume from windows of the tree, or from offloaded ones.
    """

    length: int
    pages: Ints  # [M, G, n]
    sliding_windows: SlidingWindows | None
    span_ranges: Sequence[SpanRange] = ()
    offloaded_windows: SpanRange | None = None
    selective: bool = False  # load only some blocks of the spans; the row gets pages for all of them


@dataclass(frozen=True)
class PageSource:
    """Where `num_pages` pages of every head of a layer come from; they begin at page `first_page` of the text.

    They are copies of `src_pages` [G, n]; or, where that is empty, blocks of offloaded spans, one run behind the other:
    (span range, layer of the span, first block, number of blocks).
    """

    layer: int
    first_page: int
    num_pages: int
    src_pages: Ints
    offloaded: Sequence[tuple[SpanRange, int, int, int]] = ()


def attach_pages(tables: BlockTables, row: int, plan: AttachPlan, must_copy: bool) -> dict[int, list[ReadJob]] | None:
    """Put a plan's pages into a row's tables.

    Returns the blocks to load for each layer; None, and nothing is attached, where the pool has too few pages.
    """
    t = tables
    S = tables.page_size
    G = tables.counts.shape[2]
    matched = plan.pages.shape[-1]
    shared = 0 if must_copy else min(plan.length // S, matched)
    full_layers = t.full_layers(row)
    sources = list(_page_sources(t, row, plan, shared))
    src = np.concatenate([NO_PAGES.ravel(), *(s.src_pages.ravel() for s in sources)])
    held = np.concatenate([plan.pages[..., :shared].ravel(), src])
    num_pages = sum(s.num_pages for s in sources) * G
    t.pool.incref(held)  # before ensure_free, which may evict them
    if not t.pool.ensure_free(num_pages):
        t.pool.free(held)
        return None
    t.ring_base[row] = [_first_visible_page(plan.length, w, S) * S for w in t.window[row].tolist()]
    t.pages[row, full_layers, :, :shared] = plan.pages[..., :shared]
    t.counts[row, full_layers] = shared
    allocated = remaining = np.sort(t.store.allocate(num_pages))
    dst = [NO_PAGES]
    jobs = dict[int, list[ReadJob]]()
    for s in sources:
        own, remaining = np.split(remaining, [s.num_pages * G])
        pages = own.reshape(G, s.num_pages)
        place = s.first_page - int(t.ring_base[row, s.layer]) // S
        t.pages[row, s.layer, :, place : place + s.num_pages] = pages
        t.counts[row, s.layer] = place + s.num_pages
        if s.src_pages.size:
            dst.append(pages)
        starts = accumulate((n for *_, n in s.offloaded), initial=0)
        for (part, layer, first_block, n), i in zip(s.offloaded, starts, strict=False):
            job = ReadJob(part.store, part.span, layer, first_block, pages[:, i : i + n].T, (s.first_page + i) * S)
            jobs.setdefault(s.layer, []).append(job)
    _copy_pages(t, src, np.concatenate([d.ravel() for d in dst]), plan.length)
    t.kv.mass[t.kv.to_index(allocated)] = 0
    t.pool.free(src)
    t.peaks[row] = t.counts[row]
    t.mark_dirty(row)
    t.allocated_upto[row] = plan.length
    return jobs


def _page_sources(tables: BlockTables, row: int, plan: AttachPlan, num_shared: int) -> Iterator[PageSource]:
    """Yield the sources of all pages of the row that are not shared."""
    S = tables.page_size
    matched = plan.pages.shape[-1]
    end_page = -(-plan.length // tables.page_size)
    for m, layer in enumerate(tables.full_layers(row).tolist()):
        if matched > num_shared:
            yield PageSource(layer, num_shared, matched - num_shared, plan.pages[m, :, num_shared:])
        if plan.selective:
            yield PageSource(layer, matched, sum(len(p.span.keys) for p in plan.span_ranges), NO_PAGES)
        elif end_page > matched:
            offloaded = [(p, m, p.begin, p.end - p.begin) for p in plan.span_ranges]
            yield PageSource(layer, matched, end_page - matched, NO_PAGES, offloaded)
    for i, layer in enumerate(tables.ring_layers(row).tolist()):
        first = _first_visible_page(plan.length, int(tables.window[row, layer]), S)
        if plan.offloaded_windows:
            start_block = first - plan.offloaded_windows.span.window_starts[i]
            offloaded = [(plan.offloaded_windows, i, start_block, end_page - first)]
            yield PageSource(layer, first, end_page - first, NO_PAGES, offloaded)
        elif plan.sliding_windows:
            place = plan.sliding_windows.first_pages[i]
            pages = plan.sliding_windows.pages[i][:, first - place : end_page - place]
            yield PageSource(layer, first, end_page - first, pages)


def _first_visible_page(position: int, window: int, page_size: int) -> int:
    """Return the page with the oldest token that a query at `position` sees."""
    return max(position - window + 1, 0) // page_size


def _copy_pages(tables: BlockTables, src: Ints, dst: Ints, end: int) -> None:
    """Copy pages; tokens from position `end` on become holes."""
    tables.store.copy(src, dst)
    index = tables.kv.to_index(dst)
    pos = tables.kv.pos[index]
    tables.kv.pos[index] = pos.masked_fill_(pos >= end, -1)
