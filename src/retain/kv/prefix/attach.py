"""Attaching the pages of a text to a row: shared pages, copied pages, and pages that a loader fills.

Whole pages of the text are shared. A page of which only a part matches is copied: at most one of each head. So are all
pages where the row's queries add mass to their slots. A text in stores gets pages of the row's own, all holes until its
blocks are loaded. Only layers without a window are attached here: the others are a checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from retain.kv.memory.block_layout import BlockLayout
from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.span import ReadJob, SpanRange
from retain.types import Ints

NO_PAGES: Ints = np.zeros((0, 0), np.int32)


@dataclass(frozen=True)
class PagesOfText:
    """The first `length` tokens of a text: blocks of the tree [K, n], then ranges of spans.

    Of the blocks the row shares the pages of the first `shared_length` tokens. `selective`: of the spans only some
    blocks are loaded; the row gets pages for all of them.
    """

    length: int
    blocks: Ints
    shared_length: int
    span_ranges: Sequence[SpanRange] = ()
    selective: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """What the layers of a group without a window [M] get: pages of every head, the first `num_shared` shared."""

    matched: Ints  # [M, G, n] pages of the tree
    num_shared: int
    num_pages: int

    @property
    def num_own(self) -> int:
        """Pages that the row must take from the pool."""
        M, G, _ = self.matched.shape
        return M * G * (self.num_pages - self.num_shared)


def num_own_pages(groups: Sequence[BlockTables], layout: BlockLayout, plan: PagesOfText) -> int:
    """Return how many pages `attach_pages` takes from the pool."""
    return sum(own.num_own for own in _group_plans(groups, layout, plan))


def attach_pages(
    groups: Sequence[BlockTables], layout: BlockLayout, row: int, plan: PagesOfText
) -> dict[int, list[ReadJob]]:
    """Put the pages of a text into the tables of an empty row. The pool has those that this takes.

    Returns the blocks to load for each layer of the model.
    """
    jobs: dict[int, list[ReadJob]] = {}
    span_layer = 0
    for g, (t, own) in enumerate(zip(groups, _group_plans(groups, layout, plan), strict=True)):
        layers = t.full_layers(row)[: len(own.matched)]
        M, G, n = own.matched.shape
        taken = np.sort(t.store.allocate(own.num_own)).reshape(M, G, own.num_pages - own.num_shared)
        shared = own.matched[..., : own.num_shared]
        t.pool.incref(shared)
        pages = np.concatenate([shared, taken], axis=2)
        t.pages[row, layers, :, : own.num_pages] = pages
        t.counts[row, layers] = own.num_pages
        copies = pages[..., own.num_shared : n].ravel()
        t.store.copy(own.matched[..., own.num_shared :].ravel(), copies)
        t.store.punch_from(copies, plan.length)  # tokens behind the end become holes
        t.kv.mass[t.kv.to_index(taken.ravel())] = 0
        t.peaks[row] = t.counts[row]
        t.mark_dirty(row)
        t.allocated_upto[row] = plan.length
        t.rings[row].written_upto = plan.length
        r = layout.groups[g].pages_per_block
        for layer, held in zip(t.layers[layers].tolist(), pages, strict=True):
            if not plan.selective:
                found = list(_read_jobs(plan.span_ranges, span_layer, held[:, n:], n, t.page_size, r, g))
                jobs |= {layer: found} if found else {}
            span_layer = span_layer + 1
    return jobs


def _group_plans(groups: Sequence[BlockTables], layout: BlockLayout, plan: PagesOfText) -> list[GroupPlan]:
    found = []
    for t, blocks, of_block in zip(groups, layout.split(plan.blocks), layout.groups, strict=True):
        end = -(-plan.length // t.page_size) if len(blocks) else 0
        matched = blocks[..., : min(blocks.shape[-1], end)]
        num_shared = min(plan.shared_length // t.page_size, matched.shape[-1])
        if plan.selective and len(blocks):
            end = matched.shape[-1] + sum(len(p.span.keys) for p in plan.span_ranges) * of_block.pages_per_block
        found.append(GroupPlan(matched, num_shared, end))
    return found


def _read_jobs(
    ranges: Sequence[SpanRange], layer: int, pages: Ints, first_page: int, page_size: int, r: int, group: int
) -> Iterator[ReadJob]:
    """Yield the reads of one layer of spans into pages [G, n], one run behind the other; a block has r pages."""
    starts = accumulate(((p.end - p.begin) * r for p in ranges), initial=0)
    for part, i in zip(ranges, starts, strict=False):
        n = (part.end - part.begin) * r
        position = (first_page + i) * page_size
        yield ReadJob(part.store, part.span, layer, part.begin * r, pages[:, i : i + n].T, position, group)
