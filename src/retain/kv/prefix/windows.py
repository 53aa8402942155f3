"""Capturing the windows of a row's sliding layers, so that later texts can go on from that position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints


def capture_sliding_windows(groups: Sequence[BlockTables], row: int, end: int) -> SlidingWindows | None:
    """Return the pages of the row's rings as they are before position `end`, which are held once more.

    Where the row has computed more than that, it may have written over tokens that no query at `end` sees. The snapshot
    holds copies of such pages, without the later tokens: a row that goes on from `end` must not see them.

    None where too much of a window is overwritten, or the pool has no pages for the copies.
    """
    first_pages = []
    found: list[tuple[int, Ints]] = []  # group and pages of each layer
    overwritten: list[Ints] = []  # numbers of the pages of each layer that hold later tokens
    min_resume_position = max(t.min_resume_position[row] for t in groups)
    layers = [(g, t, layer) for g, t in enumerate(groups) for layer in t.ring_layers(row)]
    for g, t, layer in layers:
        S = t.page_size
        end_page = -(-end // S)
        block_begin = end // t.block_size * t.block_size  # where a tier lets texts resume; the tree does at `end`
        W, capacity, base = (int(x[row, layer]) for x in (t.window, t.capacity, t.ring_base))
        first = max((block_begin - W + 1) // S, end_page - capacity // S, base // S, 0)
        places = (np.arange(first, end_page) * S - base) % capacity // S
        pages: Ints = t.pages[row, layer][:, places]
        first_pages.append(first)
        found.append((g, pages))
        # Nothing is read from the device: a later token, or a rejected draft, took the place of each one before `kept`.
        kept = min(int(t.written_upto[row]) - capacity, end)
        overwritten.append(np.arange(max(-(-kept // S) - first, 0), dtype=np.int32))
        begin = max(kept, first * S)
        min_resume_position = max(min_resume_position, begin + W - 1 if begin else 0)
    if min_resume_position > end:
        return None
    pool = groups[0].pool
    copied = [pages[:, i] for (_, pages), i in zip(found, overwritten, strict=True)]
    num_copied = sum(pages.size for pages in copied)
    held = np.setdiff1d(np.concatenate([p.ravel() for _, p in found]), np.concatenate([p.ravel() for p in copied]))
    pool.incref(held)
    if num_copied and not pool.ensure_free(num_copied):
        pool.free(held)
        return None
    for (g, pages), i, own in zip(found, overwritten, copied, strict=True):
        if len(i):
            pages[:, i] = _copies_before(groups[g].store, own, end)
    windows = tuple(pages for _, pages in found)
    return SlidingWindows(tuple(first_pages), windows, min_resume_position, tuple(g for g, _ in found))


def _copies_before(store: PageStore, pages: Ints, end: int) -> Ints:
    """Return copies of pages, in which tokens from position `end` on are holes."""
    copies = store.copy_of(pages)
    store.punch_from(copies.ravel(), end)
    return copies
