"""Capturing the windows of a row's sliding layers, so that later texts can go on from that position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints


def capture_sliding_windows(groups: Sequence[BlockTables], row: int, end: int) -> SlidingWindows | None:
    """Return the pages of the row's rings as they are before position `end`, which are held once more.

    None where too much of a window is overwritten.
    """
    first_pages = []
    found: list[tuple[int, Ints]] = []  # group and pages of each layer
    min_resume_position = 0
    layers = [(g, t, layer) for g, t in enumerate(groups) for layer in t.ring_layers(row)]
    for g, t, layer in layers:
        S = t.page_size
        end_page = -(-end // S)
        block_begin = end // t.block_size * t.block_size  # where a tier lets texts resume; the tree does at `end`
        W, capacity, base = (int(x[row, layer]) for x in (t.window, t.capacity, t.ring_base))
        first = max((block_begin - W) // S, end_page - capacity // S, base // S, 0)
        places = (np.arange(first, end_page) * S - base) % capacity // S
        pages: Ints = t.pages[row, layer][:, places]
        first_pages.append(first)
        found.append((g, pages))
        # Later tokens may have overwritten the oldest ones. All heads of a ring hold the same positions.
        expected = np.arange(first * S, end)
        actual = t.kv.pos[t.kv.to_index(pages[0])].flatten()[: len(expected)].cpu().numpy()
        lost = expected[actual != expected]
        begin = int(lost[-1]) + 1 if len(lost) else first * S
        min_resume_position = max(min_resume_position, begin + W - 1 if begin else 0)
    if min_resume_position > end:
        return None
    groups[0].pool.incref(np.concatenate([pages.ravel() for _, pages in found]))
    held = tuple(pages for _, pages in found)
    return SlidingWindows(tuple(first_pages), held, min_resume_position, tuple(g for g, _ in found))
