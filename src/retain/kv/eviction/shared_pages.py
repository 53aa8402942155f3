"""Pages that a row with a budget shares with others, until it first evicts.

Before that it is like any other row: its pages hold its text, and the prefix cache and other rows may hold them, too. A
page with two holders is never written, so pages of the row's own take the place of those that the eviction writes into.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.types import Ints

NO_PAGES: Ints = np.zeros(0, np.int32)


class SparePages:
    """Pages that a row owns beside its tables, for its next eviction."""

    def __init__(self, store: PageStore):
        self.store = store
        self.pages = NO_PAGES

    def reserve(self, num_pages: int) -> bool:
        """Own so many pages, at least. False if the pool has too few."""
        missing = num_pages - len(self.pages)
        if missing > 0:
            if not self.store.pool.ensure_free(missing):
                return False
            self.pages = np.concatenate([self.pages, self.store.allocate(missing)])
        return True

    def take(self, num_pages: int) -> Ints:
        """Return some of the pages, which are in the caller's tables from now on."""
        taken = self.pages[:num_pages]
        self.pages = self.pages[num_pages:]
        return taken

    def release(self) -> None:
        """Give the pages back to the pool."""
        self.store.pool.free(self.pages)
        self.pages = NO_PAGES


class SharedPages:
    """The pages of the unwindowed layers [M] of one row that others hold, by their places in the tables.

    `spare` are pages that will take the place of some. The row owns them from `reserve` to its eviction.
    """

    def __init__(self, tables: BlockTables, row: int, layers: Ints):
        self.tables = tables
        self.row = row
        self.layers = layers
        self.spare = SparePages(tables.store)

    def reserve(self, num_pages: int) -> bool:
        """Own a page for each shared one at the first places of each head. False if there are too few."""
        return self.spare.reserve(int(self._shared(num_pages).sum()))

    def evict_holders(self) -> bool:
        """Evict cached texts that hold pages of the row, which may write into them then. False if there are no such.

        The spare pages are given back, for fewer are needed.
        """
        n = self.tables.pages.shape[3]
        shared = self._pages(n)[self._shared(n)]
        pool = self.tables.pool
        if not len(shared) or not pool.uncache_callback:
            return False
        self.spare.release()
        pool.uncache_callback(shared)
        return bool((pool.ref_counts[shared] == 1).any())

    def reserve_all(self, num_pages: int) -> bool:
        """Own a page for every one at these places, which will be shared. False if there are too few."""
        return self.spare.reserve(int(self._owned(num_pages).sum()))

    def replace(self, num_pages: int) -> Ints | None:
        """Return tables [M, G, n] of these places with pages of the row's own for shared ones.

        None where no page of the row is shared, at these places or behind them. The row's tables stay as they are until
        `put`.
        """
        if not self._shared(self.tables.pages.shape[3]).any():
            self.spare.release()
            return None
        shared = self._shared(num_pages)
        num_shared = int(shared.sum())
        if not self.spare.reserve(num_shared):
            raise AssertionError("an eviction writes into pages that others hold, and no others were reserved")
        pages = np.where(self._owned(num_pages), self._pages(num_pages), 0)
        pages[shared] = np.sort(self.spare.take(num_shared))
        return pages

    def put(self, pages: Ints | None) -> None:
        """Put what `replace` returned into the tables, and give back what is not needed any more."""
        if pages is not None:
            t = self.tables
            n = pages.shape[-1]
            before = self._pages(n)
            replaced = before[self._owned(n) & (before != pages)]
            t.pages[self.row, self.layers, :, :n] = pages
            t.pool.free(replaced)
            t.mark_dirty(self.row)
        self.spare.release()

    def copy(self) -> None:
        """Give the row copies of all shared pages."""
        self.spare.release()
        layers, heads, places = np.nonzero(self._shared(self.tables.pages.shape[3]))
        if len(layers):
            self.tables.replace_by_copies(self.row, (self.layers[layers], heads, places))

    def _pages(self, num_pages: int) -> Ints:
        """Return a copy of the tables of the first places, [M, G, n]."""
        found: Ints = self.tables.pages[self.row, self.layers, :, :num_pages]
        return found

    def _owned(self, num_pages: int) -> NDArray[np.bool_]:
        owned: NDArray[np.bool_] = self.tables.owned(self.row)[self.layers, :, :num_pages]
        return owned

    def _shared(self, num_pages: int) -> NDArray[np.bool_]:
        shared: NDArray[np.bool_] = self.tables.pool.ref_counts[self._pages(num_pages)] > 1
        return shared & self._owned(num_pages)
