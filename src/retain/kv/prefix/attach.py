"""Attaching a prefix to a row: shared pages, copied pages, and pages that a loader fills.

Whole pages of the text are shared, and so are those of the windows of sliding layers, until the row writes into them. A
page of which only a part matches is copied: at most one of each head. So are all pages of unwindowed layers where the
row's queries add mass to their slots. An offloaded prefix gets pages of the row's own, all holes until its blocks are
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from retain.kv.memory.block_layout import BlockLayout
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.stores.store import ReadJob, SpanRange
from retain.types import Ints

NO_PAGES: Ints = np.zeros((0, 0), np.int32)


@dataclass(frozen=True)
class AttachPlan:
    """What a row can begin with: `length` tokens, in blocks of the tree, then in offloaded spans.

    Sliding layers resume from windows of the tree, or from offloaded ones.
    """

    length: int
    blocks: Ints  # [K, n]; K is 0 where only sliding layers are attached
    sliding_windows: SlidingWindows | None
    span_ranges: Sequence[SpanRange] = ()
    offloaded_windows: SpanRange | None = None
    selective: bool = False  # load only some blocks of the spans; the row gets pages for all of them


@dataclass(frozen=True)
class PageSource:
    """Where `num_pages` pages of every head of a layer come from; they begin at page `first_page` of the text.

    The first `num_shared` are those of `src_pages` [G, n], and the others copies of these. Or, where that is empty,
    they are blocks of offloaded spans, one run behind the other: (span range, layer of the span, first block of that
    layer, number of blocks).
    """

    group: int
    layer: int  # of the group
    first_page: int
    num_pages: int
    src_pages: Ints
    offloaded: Sequence[tuple[SpanRange, int, int, int]] = ()
    num_shared: int = 0

    @property
    def num_own(self) -> int:
        """Pages of every head that the row must take from the pool."""
        return self.num_pages - self.num_shared


def attach_pages(
    groups: Sequence[BlockTables], layout: BlockLayout, row: int, plan: AttachPlan, must_copy: bool
) -> dict[int, list[ReadJob]] | None:
    """Put a plan's pages into a row's tables.

    Returns the blocks to load for each layer of the model; None, and nothing is attached, where the pool has too few
    pages.
    """
    pool = groups[0].pool
    sources = list(_page_sources(groups, layout, row, plan, 0 if must_copy else plan.length))
    held = np.concatenate([NO_PAGES.ravel(), *(s.src_pages.ravel() for s in sources)])
    assert len(np.unique(held)) == len(held), "a page is named twice"
    num_pages = sum(s.num_own * groups[s.group].counts.shape[2] for s in sources)
    pool.incref(held)  # before ensure_free, which may evict them
    if not pool.ensure_free(num_pages):
        pool.free(held)
        return None
    jobs: dict[int, list[ReadJob]] = {}
    for g, tables in enumerate(groups):
        _attach_group(tables, row, plan.length, [s for s in sources if s.group == g], jobs)
    return jobs


def _attach_group(
    t: BlockTables,
    row: int,
    length: int,
    sources: Sequence[PageSource],
    jobs: dict[int, list[ReadJob]],
) -> None:
    """Put shared pages, and pages of the row's own, into the tables of a group; add what is to be loaded."""
    S = t.page_size
    G = t.counts.shape[2]
    t.ring_base[row] = [_first_visible_page(length, w, S) * S for w in t.window[row].tolist()]
    allocated = remaining = np.sort(t.store.allocate(sum(s.num_own for s in sources) * G))
    src = np.concatenate([NO_PAGES.ravel(), *(s.src_pages[:, s.num_shared :].ravel() for s in sources)])
    dst = [NO_PAGES.ravel()]
    for s in sources:
        own, remaining = np.split(remaining, [s.num_own * G])
        pages = own.reshape(G, s.num_own)
        if s.num_shared:
            pages = np.concatenate([s.src_pages[:, : s.num_shared], pages], axis=1)
        place = s.first_page - int(t.ring_base[row, s.layer]) // S
        t.pages[row, s.layer, :, place : place + s.num_pages] = pages
        t.counts[row, s.layer] = place + s.num_pages
        if s.src_pages.size:
            dst.append(own)
        starts = accumulate((n for *_, n in s.offloaded), initial=0)
        for (part, layer, first_block, n), i in zip(s.offloaded, starts, strict=False):
            position = (s.first_page + i) * S
            job = ReadJob(part.store, part.span, layer, first_block, pages[:, i : i + n].T, position, s.group)
            jobs.setdefault(int(t.layers[s.layer]), []).append(job)
    _copy_pages(t, src, np.concatenate(dst), length)
    t.kv.mass[t.kv.to_index(allocated)] = 0
    t.pool.free(src)
    t.peaks[row] = t.counts[row]
    t.mark_dirty(row)
    t.allocated_upto[row] = length
    rings = t.ring_layers(row)
    t.rings_shared[row] = any(s.num_shared for s in sources if s.layer in rings)


def _page_sources(
    groups: Sequence[BlockTables], layout: BlockLayout, row: int, plan: AttachPlan, shared_length: int
) -> Iterator[PageSource]:
    """Yield the sources of all pages of the row. Unwindowed layers share those of the first `shared_length` tokens.

    Spans have the layers in this order too: those without a window, or those with one, group after group.
    """
    full_layer = ring_layer = 0
    for g, (t, blocks) in enumerate(zip(groups, layout.split(plan.blocks), strict=True)):
        r = layout.groups[g].pages_per_block
        end_page = -(-plan.length // t.page_size)
        matched = min(plan.blocks.shape[-1] * r, end_page)
        num_shared = min(shared_length // t.page_size, matched)
        for m, layer in enumerate(t.full_layers(row)[: len(blocks)].tolist()):
            if matched:
                yield PageSource(g, layer, 0, matched, blocks[m, :, :matched], num_shared=num_shared)
            if plan.selective:
                yield PageSource(g, layer, matched, sum(len(p.span.keys) for p in plan.span_ranges), NO_PAGES)
            elif end_page > matched:
                offloaded = [(p, full_layer, p.begin * r, (p.end - p.begin) * r) for p in plan.span_ranges]
                yield PageSource(g, layer, matched, end_page - matched, NO_PAGES, offloaded)
            full_layer = full_layer + 1
        for layer in t.ring_layers(row).tolist():
            first = _first_visible_page(plan.length, int(t.window[row, layer]), t.page_size)
            if plan.offloaded_windows:
                start_block = first - end_page + plan.offloaded_windows.span.num_blocks[ring_layer]
                offloaded = [(plan.offloaded_windows, ring_layer, start_block, end_page - first)]
                yield PageSource(g, layer, first, end_page - first, NO_PAGES, offloaded)
            elif plan.sliding_windows:
                place = plan.sliding_windows.first_pages[ring_layer]
                pages = plan.sliding_windows.pages[ring_layer][:, first - place : end_page - place]
                num_whole = plan.length // t.page_size - first  # without the page of the next token
                yield PageSource(g, layer, first, end_page - first, pages, num_shared=num_whole)
            ring_layer = ring_layer + 1


def _first_visible_page(position: int, window: int, page_size: int) -> int:
    """Return the page with the oldest token that a query at `position` sees."""
    return max(position - window + 1, 0) // page_size


def _copy_pages(tables: BlockTables, src: Ints, dst: Ints, end: int) -> None:
    """Copy pages; tokens from position `end` on become holes."""
    tables.store.copy(src, dst)
    tables.store.punch_from(dst, end)
