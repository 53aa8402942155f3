"""Block tables: the pages of every row, layer and kv head, and the ring geometry of every row and layer.

A running request has a row. Eviction, prefixes and statistics work on these tables; only `KVCache` (cache.py) decides
which slot a position gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retain.kernels.api import KV, NO_WINDOW
from retain.kernels.slots.kv_cache_spec import KVCacheGroupSpec
from retain.kv.memory.demoted_tables import DemotedBlockTables
from retain.kv.memory.device_tables import DeviceTables
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.pool import PagePool
from retain.types import Ints

UNBOUNDED = 2**30  # a capacity that no text reaches
EXTRA_TABLE_PAGES = 16  # a selective load begins with more pages than its text has


@dataclass
class RowRings:
    """What is known of a row's rings: shrunk to their windows, and perhaps with pages that others hold, too."""

    room: int = 0  # tokens that may be written in one step: more would overwrite what those before them see
    are_shrunk: bool = False
    are_shared: bool = False
    resumes_from: int = 0  # where a text could go on at the earliest with the rings that the row began with
    written_upto: int = 0  # no position from there on was ever written, rejected ones included


class BlockTables:
    """Tables of N rows, L layers and G kv heads over one pool; every head may own another number of pages.

    The layers are those of a KV cache group, counted from 0. A block of the prefix cache has `block_size` tokens, as a
    page has where it is 0. The place of a token in a ring is `(pos - ring_base) mod capacity`; its page is
    `pages[place // S]`.
    """

    def __init__(
        self,
        store: PageStore,
        num_rows: int,
        group: KVCacheGroupSpec,
        max_pages: int,
        demoted_store: PageStore | None = None,
        block_size: int = 0,
    ):
        N = num_rows
        L = len(group.caches)
        G = group.num_kv_heads
        self.store = store
        self.group = group
        self.block_size = block_size or store.page_size
        self.pages: Ints = np.zeros((N, L, G, max_pages + EXTRA_TABLE_PAGES), np.int32)
        self.counts: Ints = np.zeros((N, L, G), np.int32)
        self.peaks: Ints = np.zeros((N, L, G), np.int32)  # most pages that were ever owned
        self.window: Ints = np.full((N, L), NO_WINDOW, np.int32)
        self.capacity: Ints = np.full((N, L), UNBOUNDED, np.int32)  # slots that a head may own
        self.ring_base: Ints = np.zeros((N, L), np.int32)
        self.headroom: Ints = np.zeros((N, L), np.int32)  # slots owned beyond those of the tokens there are
        self.allocated_upto = [0] * N  # positions below this have their pages in every layer, to be written
        self.rings = [RowRings() for _ in range(N)]
        self.free_rows = list(range(N - 1, -1, -1))
        self.demoted: DemotedBlockTables | None = None
        if demoted_store:
            self.demoted = DemotedBlockTables(demoted_store, N, L, G, max_pages * self.page_size)
        arrays = [self.pages, self.counts, self.window, self.ring_base, self.capacity]
        self.on_device = DeviceTables(arrays, store.kv.device, self.demoted)

    @property
    def pool(self) -> PagePool:
        """What counts the pages of all groups."""
        return self.store.pool

    @property
    def kv(self) -> KV:
        """The memory of the pages."""
        return self.store.kv

    @property
    def page_size(self) -> int:
        """The number of slots in a page; each holds K and V of one token."""
        return self.store.page_size

    @property
    def max_pages(self) -> int:
        """Pages of one head, for the longest text."""
        return self.pages.shape[3] - EXTRA_TABLE_PAGES

    @cached_property
    def layers(self) -> Ints:
        """The numbers of the layers in the model, [L]."""
        return np.array(self.group.caches, np.int32)

    @property
    def is_state(self) -> bool:
        """Whether the layers have no attention: see KVCacheGroupSpec."""
        return self.group.is_state

    @property
    def open_rows(self) -> list[int]:
        """Rows that belong to a request, ascending."""
        return sorted(set(range(len(self.allocated_upto))) - set(self.free_rows))

    def open_row(self, windows: Ints, capacities: Ints, room: int) -> int:
        """Take a free row and reset it: no pages, these windows and capacities, both [L], and room in its rings."""
        row = self.free_rows.pop()
        self.window[row] = windows
        self.capacity[row] = capacities
        self.ring_base[row] = self.counts[row] = self.peaks[row] = self.headroom[row] = 0
        self.allocated_upto[row] = 0
        self.rings[row] = RowRings(room)
        self.mark_dirty(row, dense=not self.group.is_draft)  # which has no slot of the first token
        return row

    def close_row(self, row: int) -> None:
        """Free the row and every page in its tables."""
        self.pool.free(self.page_list([row]))
        self.counts[row] = 0
        if self.demoted:
            self.demoted.clear(row)
        self.free_rows.append(row)

    def mark_dirty(self, row: int, dense: bool | None = None) -> None:
        """Upload the row's tables before the next step. `dense`: position i of unwindowed layers is at place i."""
        self.on_device.mark_dirty(row, dense)

    def full_layers(self, row: int) -> Ints:
        """Layers without a window, [M]."""
        return np.flatnonzero(self.window[row] == NO_WINDOW).astype(np.int32)

    def ring_layers(self, row: int) -> Ints:
        """Return the layers in which a row keeps a window of newest tokens only."""
        return np.flatnonzero(self.window[row] < NO_WINDOW).astype(np.int32)

    def note_written(self, rows: Ints, positions: Ints) -> None:
        """Note that a step writes tokens of these rows at these positions, both [T].

        What a ring holds follows on the host: the last `capacity` positions, whose rejected ones left holes.
        """
        if not (self.window[rows] < NO_WINDOW).any():
            return
        ends = np.zeros(len(self.rings), np.int32)
        np.maximum.at(ends, rows, positions.astype(np.int32) + 1)
        for row in np.flatnonzero(ends).tolist():
            self.rings[row].written_upto = max(self.rings[row].written_upto, int(ends[row]))

    def note_shared_rings(self, row: int, num_computed_tokens: int) -> None:
        """Note that others hold pages of a row's rings from now on: it must not write into these."""
        begin = num_computed_tokens // self.page_size * self.page_size
        self.rings[row].are_shared = True
        self.allocated_upto[row] = min(self.allocated_upto[row], begin)

    def grow(self, row: int, counts: Ints) -> None:
        """Own as many pages of each head as `counts` [L, G] says, no fewer than there are. The pool has them."""
        had = self.counts[row]
        places = np.arange(counts.max(initial=0))
        new = (places >= had[..., None]) & (places < counts[..., None])  # [L, G, n]
        taken = self.store.allocate(int((counts - had).sum()))
        self.pages[row, :, :, : len(places)][new] = np.sort(taken)  # a head's pages side by side, as far as they go
        self.counts[row] = counts
        np.maximum(self.peaks[row], counts, out=self.peaks[row])
        self.mark_dirty(row)

    def replace_by_copies(self, row: int, where: tuple[NDArray[Any], ...]) -> None:
        """Give the row copies of pages that others hold, too, at these layers, heads and places. Raises OutOfPages."""
        shared: Ints = self.pages[row][where]
        self.pages[row][where] = self.store.copy_of(shared)
        self.pool.free(shared)
        self.mark_dirty(row)

    def owned(self, row: int) -> NDArray[np.bool_]:
        """Mark the entries of a row's tables that are pages, [L, G, n]."""
        mask: NDArray[np.bool_] = np.arange(self.pages.shape[3]) < self.counts[row][..., None]
        return mask

    def ring_mask(self, row: int) -> NDArray[np.bool_]:
        """Mark the entries of a row's tables that are pages of its rings, [L, G, n]."""
        mask: NDArray[np.bool_] = self.owned(row) & (self.window[row] < NO_WINDOW)[:, None, None]
        return mask

    def ring_pages(self, row: int) -> Ints:
        """List the pages of a row's rings."""
        found: Ints = self.pages[row][self.ring_mask(row)]
        return found

    def page_list(self, rows: Sequence[int]) -> Ints:
        """List the pages of these rows, once for each table that holds them."""
        found = [self.pages[row][self.owned(row)] for row in rows]
        demoted = [self.demoted.page_list(row) for row in rows] if self.demoted else []
        return np.concatenate([np.zeros(0, np.int32), *found, *demoted])

    def positions(self, row: int) -> list[list[list[int]]]:
        """List the positions in the slots of every layer and head, [L][G], ascending."""
        kinds: list[BlockTables | DemotedBlockTables] = [self, *([self.demoted] if self.demoted else [])]
        _, L, G = self.counts.shape

        def of_head(layer: int, g: int) -> list[int]:
            pages = [(t.store.kv, t.pages[row, layer, g, : t.counts[row, layer, g]]) for t in kinds]
            held = torch.cat([kv.pos[kv.to_index(own)].flatten() for kv, own in pages])
            found: list[int] = held[held >= 0].sort().values.tolist()
            return found

        return [[of_head(layer, g) for g in range(G)] for layer in range(L)]

    def remove_pages(self, row: int, layer: int, begin: int, end: int) -> None:
        """Free the pages of a layer from place `begin` to `end` of every head; those behind them move up."""
        n = int(self.counts[row, layer, 0])
        pages = self.pages[row, layer]
        if end > begin:
            removed = pages[:, begin:end].flatten()  # a copy: the next line writes over it
            pages[:, begin : n - end + begin] = pages[:, end:n].copy()
            self.counts[row, layer] -= end - begin
            self.ring_base[row, layer] += (end - begin) * self.page_size
            self.mark_dirty(row)
            self.pool.free(removed)
