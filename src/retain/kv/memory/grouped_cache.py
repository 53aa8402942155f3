"""The slots of rows in all KV cache groups: a row has the same number in the tables of each group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.cache import KVCache, ensure_pages
from retain.types import Ints

T = TypeVar("T")


class GroupedKVCache:
    """The caches of all groups, over one pool of pages."""

    def __init__(self, groups: Sequence[KVCache]):
        self.groups = groups
        self.pool = groups[0].tables.pool

    @cached_property
    def tables(self) -> list[BlockTables]:
        """The tables of each group."""
        return [group.tables for group in self.groups]

    def open_row(self, windows: Sequence[Ints], num_uncomputed: int) -> int:
        """Open a row of these windows, [L] of each group, for a request with so many uncomputed tokens."""
        rows = {group.open_row(w, num_uncomputed) for group, w in zip(self.groups, windows, strict=True)}
        (row,) = rows  # groups open and close rows together
        return row

    def close_row(self, row: int) -> None:
        """Free the row and every page in its tables."""
        for tables in self.tables:
            tables.close_row(row)

    def reserve(self, row: int, upto: int) -> bool:
        """Own the pages of all positions below `upto`. False, and nothing is taken, when the pool has too few."""
        if not ensure_pages(self.groups, row, upto):
            return False
        for group in self.groups:
            group.own_pages(row, upto)
        return True

    def fork_row(self, src: int, dst: int, num_computed_tokens: int, can_share: bool) -> bool:
        """Give the open row `dst` the first `num_computed_tokens` of `src`: shared where allowed, else copied.

        False when the pool has too few pages; the caller then closes `dst`.
        """
        return all(group.fork_row(src, dst, num_computed_tokens, can_share) for group in self.groups)

    def shrink_rings(self, row: int, computed: int) -> None:
        """Shrink rings to their window and free the rest: from now on one token a step is written."""
        for group in self.groups:
            group.shrink_rings(row, computed)

    def page_list(self, rows: Sequence[int]) -> Ints:
        """List the pages of these rows, once for each table that holds them."""
        return np.concatenate([tables.page_list(rows) for tables in self.tables])

    def peak_slots_per_layer(self, row: int) -> list[int]:
        """Most slots that one head of each layer ever owned."""
        return self._in_order([(t.peaks[row].max(1) * t.page_size).tolist() for t in self.tables])

    def slots_per_layer(self, row: int) -> list[int]:
        """Slots that the largest head of each layer owns now."""
        return self._in_order([(t.counts[row].max(1) * t.page_size).tolist() for t in self.tables])

    def positions(self, row: int) -> list[list[list[int]]]:
        """List the positions in the slots of every layer and head, ascending."""
        return self._in_order([tables.positions(row) for tables in self.tables])

    def _in_order(self, by_group: Sequence[Sequence[T]]) -> list[T]:
        """Return what each group says of its layers, in the order of the model's layers that have a cache."""
        layers = np.concatenate([tables.layers for tables in self.tables])
        found = [x for own in by_group for x in own]
        return [found[i] for i in np.argsort(layers)]
