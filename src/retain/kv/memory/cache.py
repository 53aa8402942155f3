"""The slot algebra: which pages a row needs, and the slot of every fresh token, in all layers and heads.

Row and layer have a ring, given by two numbers:

    place(pos) = (pos - ring_base) mod capacity          slot = pages[place // S] * S + place % S

`full` is a ring whose capacity is never reached. A ring of window W that is written T fresh tokens at a time has room
for W + T - 1 slots, so that no chunk overwrites a key that one of its own queries still sees; rounded up to whole
pages, and at least W + S - 1, so that no page ever mixes live tokens with dead ones. (W + B - 1 where blocks of the
prefix cache have B > S tokens: its windows end with a block.) That makes `shrink_rings` a change of labels: after the
prompt the pages with live tokens come first, the others are freed, and nothing moves.

              pages  | 8 9 | 2 3 | 4 5 | 6 7 |     S = 2, capacity 8, W = 3, next token 10: 8 and 9 (and 7) are live
    shrink_rings ->  | 6 7 | 8 9 |                 ring_base 6, capacity 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints


def ring_capacities(windows: Ints, fresh: int, page_size: int, block_size: int) -> Ints:
    """Slots that a head of each layer may own when `fresh` tokens are written at a time, [L]."""
    slots = windows.astype(np.int64) + max(fresh, block_size) - 1
    return np.minimum(-(-slots // page_size) * page_size, UNBOUNDED).astype(np.int32)


def ensure_pages(caches: Sequence[KVCache], row: int, upto: int) -> bool:
    """Return whether the pool has the pages that the row must take for all positions below `upto`, in these groups.

    If it has too few, checkpoints that hold pages of the row are evicted: then it may write into these.
    """
    pool = caches[0].tables.pool
    if pool.ensure_free(sum(cache.num_missing_pages(row, upto) for cache in caches)):
        return True
    for cache in caches:
        cache.release_shared_pages(row, upto)
    return pool.ensure_free(sum(cache.num_missing_pages(row, upto) for cache in caches))


class KVCache:
    """Slots of the rows of `tables`, of whose tokens at most `max_batched_tokens` are written in one step."""

    def __init__(self, tables: BlockTables, max_batched_tokens: int):
        self.tables = tables
        self.max_batched_tokens = max_batched_tokens

    def open_row(self, windows: Ints, num_uncomputed: int) -> int:
        """Open a row of these windows [L] for a request with so many uncomputed tokens. It owns no pages yet."""
        t = self.tables
        fresh = min(num_uncomputed, self.max_batched_tokens)
        capacities = ring_capacities(windows, 1 if t.is_state else fresh, t.page_size, t.block_size)
        return t.open_row(windows, capacities, max(fresh, t.block_size))

    def own_pages(self, row: int, upto: int) -> None:
        """Own the pages of all positions below `upto`, which the pool has."""
        t = self.tables
        S = self.tables.page_size
        if upto <= t.allocated_upto[row]:
            return
        if t.rings[row].are_shared:
            self._replace_shared_pages(row, upto)
        wanted = self._wanted_pages(row, upto)
        if (wanted != t.counts[row]).any():
            t.grow(row, wanted)
        owned = wanted[:, 0] * S
        upto_by_layer = np.where(owned >= t.capacity[row], UNBOUNDED, t.ring_base[row] + owned - t.headroom[row])
        t.allocated_upto[row] = int(upto_by_layer.min())
        if t.rings[row].are_shared:
            t.allocated_upto[row] = min(t.allocated_upto[row], -(-upto // S) * S)

    def num_missing_pages(self, row: int, upto: int) -> int:
        """Return the pages that the row must take to write all positions below `upto`.

        It does not own them yet, or others hold those of a ring that it would write over.
        """
        t = self.tables
        if upto <= t.allocated_upto[row]:
            return 0
        missing = int((self._wanted_pages(row, upto) - t.counts[row]).sum())
        return missing + (len(self._shared_ring_pages(row, upto)[0]) if t.rings[row].are_shared else 0)

    def release_shared_pages(self, row: int, upto: int) -> None:
        """Let cached checkpoints go that hold pages which the row writes over: there are none to take instead."""
        t = self.tables
        if t.rings[row].are_shared and t.pool.uncache_callback:
            t.pool.uncache_callback(t.pages[row][self._shared_ring_pages(row, upto)])

    def _shared_ring_pages(self, row: int, upto: int) -> tuple[Ints, Ints, Ints]:
        """Return the pages of rings that others hold, too, and the row writes over on the way to `upto`.

        They are given by layers, heads and places in tables, each once.
        """
        t = self.tables
        S = t.page_size
        layers = t.ring_layers(row)
        ahead = np.arange(-(-t.allocated_upto[row] // S), -(-upto // S))  # pages of the text
        places = (ahead - t.ring_base[row, layers, None] // S) % (t.capacity[row, layers, None] // S)  # [L, n]
        pages = t.pages[row, layers[:, None], :, places]  # [L, n, G]
        is_owned = places < t.counts[row, layers, :1]  # all heads of a ring own as many
        i, n, g = np.nonzero((t.pool.ref_counts[pages] > 1) & is_owned[..., None])
        found = np.unique(np.stack([layers[i], g, places[i, n]]), axis=1)  # a small ring is passed more than once
        return found[0], found[1], found[2]

    def _replace_shared_pages(self, row: int, upto: int) -> None:
        """Give the row's rings copies of the pages that they write over and others hold.

        Tokens in them may still be seen by the first of the fresh tokens.
        """
        t = self.tables
        where = self._shared_ring_pages(row, upto)
        if len(where[0]):
            t.replace_by_copies(row, where)
        t.rings[row].are_shared = bool((t.pool.ref_counts[t.ring_pages(row)] > 1).any())

    def _wanted_pages(self, row: int, upto: int) -> Ints:
        """Return the pages of each head for all positions below `upto`, [L, G], or those that it owns already."""
        t = self.tables
        slots = np.minimum(upto - t.ring_base[row] + t.headroom[row], t.capacity[row])  # [L]
        wanted: Ints = np.maximum(-(-slots // t.page_size)[:, None], t.counts[row])
        return wanted

    def slot_mapping(self, rows: Ints, positions: Ints) -> Ints:
        """The slots of fresh tokens of these rows at these positions, both [T] -> int32 [L, G, T]."""
        t = self.tables
        S = self.tables.page_size
        ring = ((positions[:, None] - t.ring_base[rows]) % t.capacity[rows]).T  # [L, T]
        pages = t.pages[rows, np.arange(len(ring))[:, None], :, ring // S]  # [L, T, G]
        slots: Ints = (pages * np.int32(S) + (ring % S)[:, :, None].astype(np.int32)).transpose(0, 2, 1)  # [L, G, T]
        if t.is_state and len(rows):
            last = np.zeros(len(t.allocated_upto), np.int32)  # of the step, by row
            np.maximum.at(last, rows, positions)
            is_overwritten = (positions[:, None] + t.capacity[rows] <= last[rows, None]).T  # [L, T], in the same step
            slots = np.where(is_overwritten[:, None], np.int32(0), slots)  # slot 0 is of the trash page
        return slots

    def fork_row(self, src: int, dst: int, num_computed_tokens: int, can_share: bool) -> bool:
        """Give the open row `dst` the first `num_computed_tokens` of `src`: shared where allowed, else copied.

        Pages of rings are shared until one of the rows writes into them.

        False when the pool has too few pages; the caller then closes `dst`.
        """
        t = self.tables
        S = self.tables.page_size
        rings = t.ring_layers(dst)
        t.capacity[dst, rings] = t.capacity[src, rings]
        t.ring_base[dst, rings] = t.ring_base[src, rings]
        room = t.rings[src].room if len(rings) else max(self.max_batched_tokens, t.block_size)
        t.rings[dst] = replace(t.rings[src], room=room, are_shrunk=False, are_shared=False)
        num_shared = np.zeros_like(t.counts[src])  # [L, G]
        num_shared[rings] = t.counts[src, rings]
        if can_share:
            num_shared[t.full_layers(dst)] = num_computed_tokens // S
        places = np.arange(t.pages.shape[3])
        shared = places < num_shared[..., None]  # [L, G, n]
        t.pool.incref(t.pages[src][shared])
        t.pages[dst][shared] = t.pages[src][shared]
        t.counts[dst] = num_shared
        if not ensure_pages([self], dst, num_computed_tokens):
            return False
        self.own_pages(dst, num_computed_tokens)
        t.peaks[dst] = np.maximum(t.peaks[dst], t.counts[dst])
        copied = (places < np.minimum(t.counts[dst], t.counts[src])[..., None]) & ~shared
        t.store.copy(t.pages[src][copied], t.pages[dst][copied])
        for row in (src, dst) if len(rings) else ():
            t.note_shared_rings(row, num_computed_tokens)
        return True

    def shrink_rings(self, row: int, computed: int) -> None:
        """Shrink rings to their window and free the rest: from now on one token a step is written."""
        t = self.tables
        S = self.tables.page_size
        if t.rings[row].are_shrunk:
            return
        t.rings[row].are_shrunk = True
        t.rings[row].room = t.block_size
        capacity = ring_capacities(t.window[row], 1, S, t.block_size)
        freed = []
        for layer in np.flatnonzero((capacity < t.capacity[row]) & (t.window[row] < NO_WINDOW)):
            n = int(t.counts[row, layer, 0])
            oldest = max(computed - int(t.window[row, layer]), 0)  # live, or one more
            place = (oldest - t.ring_base[row, layer]) % t.capacity[row, layer]
            first = int(place // S)
            base = oldest - int(place % S)
            keep = -(-(computed - base) // S)
            table = np.roll(t.pages[row, layer, :, :n], -first, axis=1)
            t.pages[row, layer, :, :n] = table
            freed.append(table[:, keep:].ravel())
            t.ring_base[row, layer] = base
            t.capacity[row, layer] = capacity[layer]
            t.counts[row, layer] = keep
            t.allocated_upto[row] = min(t.allocated_upto[row], base + keep * S)
        if freed:
            t.pool.free(np.concatenate(freed))
            t.mark_dirty(row)
