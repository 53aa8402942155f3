"""Snapshots of a row's rings, so that a pass over tokens that are not kept can be undone."""

from __future__ import annotations

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints


class RingSnapshot:
    """Copies of the pages of a row's sliding layers, which a scoring pass overwrites."""

    def __init__(self, tables: BlockTables, row: int):
        """Copy the pages. Raises OutOfPagesError, and copies nothing, when the pool has too few."""
        self.tables = tables
        self.row = row
        rings = tables.owned(row) & (tables.window[row] < NO_WINDOW)[:, None, None]
        self.pages: Ints = tables.pages[row][rings]
        self.copies = tables.store.allocate(len(self.pages))
        tables.store.copy(self.pages, self.copies)

    @staticmethod
    def num_pages(tables: BlockTables, row: int) -> int:
        """Pages that a snapshot of this row takes."""
        return int(tables.counts[row][tables.ring_layers(row)].sum())

    def restore(self, position: int) -> None:
        """Turn every slot from `position` on into a hole, and put the content of the rings back."""
        t = self.tables
        pages = t.kv.to_index(t.pages[self.row][t.owned(self.row)])
        pos = t.kv.pos[pages]
        t.kv.pos[pages] = pos.masked_fill_(pos >= position, -1)
        t.store.copy(self.copies, self.pages)

    def free(self) -> None:
        """Free the copies."""
        self.tables.pool.free(self.copies)
        self.copies = np.zeros(0, np.int32)
