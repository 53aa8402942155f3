"""Attaching the pages of a text to a row: shared pages, copied pages, and pages that a loader fills.

Whole pages of the text are shared. A page of which only a part matches is copied: at most one of each head. So are all
pages where the row's queries add mass to their slots. A text in stores gets pages of the row's own, all holes until its
blocks are loaded. Only layers without a window are attached here: the others are a checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from retain.kv.memory.block_layout import BlockLayout
from retain.kv.memory.block_tables import BlockTables
from retain.kv.prefix.start import Start
from retain.kv.stores.offloader import Offloader
from retain.kv.stores.selective.loader import SelectiveLoader
from retain.kv.stores.store import ReadJob, SpanRange
from retain.types import Ints


def num_own_pages(groups: Sequence[BlockTables], layout: BlockLayout, start: Start) -> int:
    """Return how many pages `attach_pages` takes from the pool."""
    parts = _split(groups, layout, start)
    return sum(len(matched) * matched.shape[1] * (n - num_shared) for matched, num_shared, n in parts)


def attach_pages(
    groups: Sequence[BlockTables], layout: BlockLayout, row: int, start: Start
) -> dict[int, list[ReadJob]]:
    """Put the pages of a start into the tables of an empty row. The pool has those that this takes.

    Returns the blocks to load for each layer of the model.
    """
    jobs: dict[int, list[ReadJob]] = {}
    span_layer = 0
    for g, (t, part) in enumerate(zip(groups, _split(groups, layout, start), strict=True)):
        matched, num_shared, num_pages = part
        M, G, n = matched.shape
        layers = t.full_layers(row)[:M]
        taken = np.sort(t.store.allocate(M * G * (num_pages - num_shared)))
        shared = matched[..., :num_shared]
        t.pool.incref(shared)
        pages = np.concatenate([shared, taken.reshape(M, G, num_pages - num_shared)], axis=2)
        t.pages[row, layers, :, :num_pages] = pages
        t.counts[row, layers] = num_pages
        copies = pages[..., num_shared:n].ravel()
        t.store.copy(matched[..., num_shared:].ravel(), copies)
        t.store.punch_from(copies, start.position)  # tokens behind the end become holes
        t.kv.mass[t.kv.to_index(taken)] = 0
        t.peaks[row] = t.counts[row]
        t.mark_dirty(row)
        t.allocated_upto[row] = start.position
        t.rings[row].written_upto = start.position
        r = layout.groups[g].pages_per_block
        for layer, held in zip(t.layers[layers].tolist(), pages, strict=True):
            if not start.is_selective:
                found = list(_read_jobs(start.span_ranges, span_layer, held[:, n:], n, t.page_size, r, g))
                jobs |= {layer: found} if found else {}
            span_layer = span_layer + 1
    return jobs


def _split(groups: Sequence[BlockTables], layout: BlockLayout, start: Start) -> Iterator[tuple[Ints, int, int]]:
    """Yield for each group the pages of the tree [M, G, n], how many are shared, and how many its heads get."""
    for t, blocks, of_block in zip(groups, layout.split(start.blocks), layout.groups, strict=True):
        end = -(-start.position // t.page_size) if len(blocks) else 0
        matched = blocks[..., :end]
        num_shared = min(start.shared_length // t.page_size, matched.shape[-1])
        if start.is_selective and len(blocks):
            num_blocks = sum(len(p.span.keys) for p in start.span_ranges)
            end = matched.shape[-1] + num_blocks * of_block.pages_per_block
        yield matched, num_shared, end


def _read_jobs(
    ranges: Sequence[SpanRange], layer: int, pages: Ints, first_page: int, page_size: int, r: int, group: int
) -> Iterator[ReadJob]:
    """Yield the reads of one layer of spans into pages [G, n], one run behind the other; a block has r pages."""
    starts = accumulate(((p.end - p.begin) * r for p in ranges), initial=0)
    for part, i in zip(ranges, starts, strict=False):
        n = (part.end - part.begin) * r
        position = (first_page + i) * page_size
        yield ReadJob(part.store, part.span, layer, part.begin * r, pages[:, i : i + n].T, group, position)


def start_selective_load(
    t: BlockTables, offloader: Offloader, row: int, start: Start, jobs: dict[int, list[ReadJob]], time_limit: float
) -> SelectiveLoader:
    """Start to load the important blocks only; afterwards the row's tables are shorter than its text."""
    S = t.page_size
    first = start.blocks.shape[-1]
    layers = t.full_layers(row)
    end = first + sum(len(p.span.keys) for p in start.span_ranges)
    t.ring_base[row, layers] = start.position - end * S
    t.mark_dirty(row, dense=False)

    def trim(layer: int, n: int) -> None:
        t.remove_pages(row, layer, first + n, end)

    return SelectiveLoader(
        offloader=offloader,
        ranges=start.span_ranges,
        layers=layers.tolist(),
        pages=t.pages[row, layers, :, first:end].copy(),
        trim_pages=trim,
        other_jobs=jobs,
        time_limit=time_limit,
    )
