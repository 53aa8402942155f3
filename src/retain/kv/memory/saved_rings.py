"""Rings of a row that are kept aside, so that a pass over tokens that are not kept can be undone."""

from __future__ import annotations

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints


class SavedRings:
    """The pages of a row's sliding layers before a scoring pass, held by reference: the pass writes into others."""

    def __init__(self, tables: BlockTables, row: int, num_computed_tokens: int):
        """Hold the pages once more, and let the row write into none of them."""
        self.tables = tables
        self.row = row
        self.rings = tables.ring_mask(row)
        self.counts = tables.counts[row].copy()
        self.pages: Ints = tables.pages[row][self.rings]
        tables.pool.incref(self.pages)
        self.num_computed_tokens = num_computed_tokens
        self.written_upto = tables.rings[row].written_upto
        tables.note_shared_rings(row, num_computed_tokens)

    def restore(self, position: int) -> None:
        """Turn every slot from `position` on into a hole, and put the pages of the rings back."""
        t = self.tables
        row = self.row
        layers = t.ring_layers(row)
        t.pool.incref(self.pages)
        t.pool.free(t.ring_pages(row))
        t.pages[row][self.rings] = self.pages
        t.counts[row, layers] = self.counts[layers]
        t.rings[row].written_upto = self.written_upto
        t.mark_dirty(row)
        t.note_shared_rings(row, self.num_computed_tokens)
        t.store.punch_from(t.pages[row][t.owned(row)], position)

    def free(self) -> None:
        """Hold the pages no more."""
        self.tables.pool.free(self.pages)
        self.pages = np.zeros(0, np.int32)
