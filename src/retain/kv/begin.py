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

from retain.kernels import NO_WINDOW
from retain.kv.fetch import ReadJob
from retain.kv.node import SlidingWindows
from retain.kv.policies import Policy
from retain.kv.sleep import SpanRange

if TYPE_CHECKING:
    from retain.kv.cache import Cache

Ints = NDArray[np.int32]
SPARE = 16  # pages that a table has beyond its texts': what is chosen from comes with its spans' other tokens
NOTHING: Ints = np.zeros((0, 0), np.int32)


@dataclass(frozen=True)
class Beginning:
    """`length` tokens that a row can begin with: pages of the tree, then what sleeps, for layers that see everything;
    for sliding ones windows of the tree, or those that sleep.
    """

    length: int
    pages: Ints  # [M, G, n]
    rings: SlidingWindows | None
    parts: Sequence[SpanRange] = ()
    windows: SpanRange | None = None
    selective: bool = False  # of what sleeps only some will come: there are pages for all rows of its spans


@dataclass(frozen=True)
class Piece:
    """n pages of every head of a layer, from page `first` of the text on: copies of `src` [G, n], or, where it is
    empty, what comes from rows of a layer of spans: (part, layer, row, how many), one behind the other.
    """

    layer: int
    first: int
    n: int
    src: Ints
    asleep: Sequence[tuple[SpanRange, int, int, int]] = ()


def fork(c: Cache, row: int, policy: Policy, computed: int) -> int | None:
    """See Cache.fork: a row is free."""
    new = c.open(policy, computed)
    rings = c.window[new] < NO_WINDOW
    c.capacity[new, rings], c.base[new, rings] = c.capacity[row, rings], c.base[row, rings]
    shared = np.zeros_like(c.counts[row])  # [L, G]
    if row not in c.keepers and new not in c.keepers:
        shared[~rings] = computed // c.page_size
    places = np.arange(c.pages.shape[3])
    both = places < shared[..., None]  # [L, G, n]
    c.pool.share(c.pages[row][both])
    c.pages[new][both], c.counts[new] = c.pages[row][both], shared
    if not c.grow(new, computed):
        c.close(new)
        return None
    c.peaks[new] = np.maximum(c.peaks[new], c.counts[new])
    held = (places < np.minimum(c.counts[new], c.counts[row])[..., None]) & ~both
    c.backend.copy(c.kv, *(c.kv.index(c.pages[r][held]) for r in (row, new)))
    return new


def adopt(c: Cache, row: int, begin: Beginning, copies: bool) -> dict[int, list[ReadJob]] | None:
    """Put a beginning into a row's tables. What is to come, for each layer; None where there are too few pages."""
    S, G, had = c.page_size, c.shape.kv_heads, begin.pages.shape[-1]
    shared = 0 if copies else min(begin.length // S, had)
    pieces = list(_pieces(c, row, begin, shared))
    src = np.concatenate([NOTHING.ravel(), *(p.src.ravel() for p in pieces)])
    held = np.concatenate([begin.pages[..., :shared].ravel(), src])
    n = sum(p.n for p in pieces) * G
    c.pool.share(held)  # nobody may evict them now
    if not c.pool.room(n):
        c.pool.give(held)
        return None
    c.base[row] = [_first(begin.length, w, S) * S for w in c.window[row].tolist()]
    c.pages[row, c.window[row] == NO_WINDOW, :, :shared] = begin.pages[..., :shared]
    c.counts[row, c.window[row] == NO_WINDOW] = shared
    fresh = taken = np.sort(c.pool.take(n))
    c.kv.pos[c.kv.index(taken)] = -1
    dst, jobs = [NOTHING], dict[int, list[ReadJob]]()
    for p in pieces:
        mine, taken = np.split(taken, [p.n * G])
        pages = mine.reshape(G, p.n)
        at = p.first - int(c.base[row, p.layer]) // S
        c.pages[row, p.layer, :, at : at + p.n] = pages
        c.counts[row, p.layer] = at + p.n
        if p.src.size:
            dst.append(pages)
        ends = accumulate((k for *_, k in p.asleep), initial=0)
        for (part, layer, skip, k), i in zip(p.asleep, ends, strict=False):
            job = ReadJob(part.store, part.span, layer, skip, pages[:, i : i + k].T, (p.first + i) * S)
            jobs.setdefault(p.layer, []).append(job)
    _copy(c, src, np.concatenate([d.ravel() for d in dst]), begin.length)
    c.kv.mass[c.kv.index(fresh)] = 0
    c.pool.give(src)
    c.peaks[row] = c.counts[row]
    c.mirror.touch(row)
    c.paid[row] = begin.length
    return jobs


def cut(c: Cache, row: int, layer: int, begin: int, end: int) -> None:
    """Pages of a row's tables of a layer, from place `begin` to `end`, go back; those behind them move up."""
    n, pages = int(c.counts[row, layer, 0]), c.pages[row, layer]
    if end > begin:
        gone = pages[:, begin:end].flatten()  # a copy, whatever its shape
        pages[:, begin : n - end + begin] = pages[:, end:n].copy()
        c.counts[row, layer] -= end - begin
        c.mirror.touch(row)
        c.base[row, layer] += (end - begin) * c.page_size
        c.pool.give(gone)


def _pieces(c: Cache, row: int, begin: Beginning, shared: int) -> Iterator[Piece]:
    """All pages of the row that are not shared."""
    S, had, last = c.page_size, begin.pages.shape[-1], -(-begin.length // c.page_size)
    for m, layer in enumerate(np.flatnonzero(c.window[row] == NO_WINDOW).tolist()):
        if had > shared:
            yield Piece(layer, shared, had - shared, begin.pages[m, :, shared:])
        if begin.selective:
            yield Piece(layer, had, sum(len(p.span.keys) for p in begin.parts), NOTHING)
        elif last > had:
            asleep = [(p, m, p.begin, p.end - p.begin) for p in begin.parts]
            yield Piece(layer, had, last - had, NOTHING, asleep)
    for i, layer in enumerate(np.flatnonzero(c.window[row] < NO_WINDOW).tolist()):
        first = _first(begin.length, int(c.window[row, layer]), S)
        if begin.windows:
            asleep = [(begin.windows, i, first - begin.windows.span.window_starts[i], last - first)]
            yield Piece(layer, first, last - first, NOTHING, asleep)
        elif begin.rings:
            at = begin.rings.first_pages[i]
            yield Piece(layer, first, last - first, begin.rings.pages[i][:, first - at : last - at])


def _first(end: int, window: int, page_size: int) -> int:
    """The page with the oldest token that somebody at `end` sees."""
    return max(end - window + 1, 0) // page_size


def _copy(c: Cache, src: Ints, dst: Ints, end: int) -> None:
    """Tokens from position `end` on are left out."""
    to = c.kv.index(dst)
    c.backend.copy(c.kv, c.kv.index(src), to)
    pos = c.kv.pos[to]
    c.kv.pos[to] = pos.masked_fill_(pos >= end, -1)
