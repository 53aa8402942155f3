"""Capturing the windows of a row's sliding layers, so that later texts can resume at that position."""

from __future__ import annotations

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints


def capture_sliding_windows(tables: BlockTables, row: int, end: int, still_running: bool) -> SlidingWindows | None:
    """Return the pages of the row's rings as they are before position `end`; copies, if the row is still running.

    None where too much of a window is overwritten, or the pool has no pages for copies.
    """
    t = tables
    S = tables.page_size
    end_page = -(-end // tables.page_size)
    first_pages = []
    found = []
    min_resume_position = 0
    page_begin = end // S * S  # where a tier lets texts resume; the tree does at `end`
    for layer in t.ring_layers(row):
        W, capacity, base = (int(x[row, layer]) for x in (t.window, t.capacity, t.ring_base))
        first = max((page_begin - W) // S, end_page - capacity // S, base // S, 0)
        places = (np.arange(first, end_page) * S - base) % capacity // S
        pages: Ints = t.pages[row, layer][:, places]
        first_pages.append(first)
        found.append(pages)
        # Later tokens may have overwritten the oldest ones. All heads of a ring hold the same positions.
        expected = np.arange(first * S, end)
        actual = t.kv.pos[t.kv.to_index(pages[0])].flatten()[: len(expected)].cpu().numpy()
        lost = expected[actual != expected]
        begin = int(lost[-1]) + 1 if len(lost) else first * S
        min_resume_position = max(min_resume_position, begin + W - 1 if begin else 0)
    if min_resume_position > end:
        return None
    flat = np.concatenate([p.ravel() for p in found])
    if not still_running:
        t.pool.incref(flat)
        return SlidingWindows(tuple(first_pages), tuple(found), min_resume_position)
    if not t.pool.ensure_free(len(flat)):
        return None
    copies = t.store.allocate(len(flat))
    t.store.copy(flat, copies)
    split = np.split(copies, np.cumsum([p.size for p in found])[:-1])
    shaped = tuple(x.reshape(p.shape) for x, p in zip(split, found, strict=True))
    return SlidingWindows(tuple(first_pages), shaped, min_resume_position)
