"""The pool of page numbers: which pages are free, and how many tables hold each of the others.

A page is free, or held by one or more tables. Page 0 is the trash page, which no table owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from retain.types import Ints

Pages = Ints


class OutOfPagesError(ValueError):
    """The pool has fewer free pages than the caller asked for; nothing was taken."""


class PagePool:
    """Count references to `num_pages` pages of one size, the trash page among them."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.ref_counts = np.zeros(num_pages, np.int32)  # tables that hold each page
        self.kinds = np.zeros(num_pages, np.int8)  # of the slots that each page was last allocated for; see PageStore
        self.free_list = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack: the first num_free are free
        self.num_free = num_pages - 1
        self.peak_used = 0  # most pages that were ever in use at once
        self.evict_callback: Callable[[int], None] | None = None  # frees that many cached pages
        self.uncache_callback: Callable[[Pages], None] | None = (
            None  # evicts the cached texts and checkpoints that hold these pages
        )

    @property
    def num_used(self) -> int:
        """Pages that a table holds."""
        return self.num_pages - 1 - self.num_free

    def ensure_free(self, n: int) -> bool:
        """Return whether n pages are free, after evicting cached pages if there are fewer."""
        if n > self.num_free and self.evict_callback:
            self.evict_callback(n - self.num_free)
        return n <= self.num_free

    def allocate(self, n: int) -> Pages:
        """Take n free pages, each held once. Raises OutOfPagesError and takes none when there are fewer."""
        if n > self.num_free:
            raise OutOfPagesError(f"{n} pages wanted, {self.num_free} free")
        self.num_free -= n
        pages = self.free_list[self.num_free : self.num_free + n].copy()
        self.ref_counts[pages] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def incref(self, pages: Pages) -> None:
        """Hold these pages once more; each page may be named once."""
        self.ref_counts[pages] += 1

    def free(self, pages: Pages) -> None:
        """Hold these pages once less; pages that no table holds any more are free. Each may be named once."""
        self.ref_counts[pages] -= 1
        freed = pages[self.ref_counts[pages] == 0]
        self.free_list[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    @contextmanager
    def held(self, pages: Pages) -> Iterator[None]:
        """Hold these pages for as long as the context lasts: they stay whole though their texts are evicted.

        Each may be named once.
        """
        self.incref(pages)
        try:
            yield
        finally:
            self.free(pages)

    @contextmanager
    def owned(self) -> Iterator[list[Pages]]:
        """Return a list for pages that the caller holds: those in it are freed if the block raises."""
        held: list[Pages] = []
        try:
            yield held
        except BaseException:
            for pages in held:
                self.free(pages)
            raise

    def check(self, table_pages: Pages) -> None:
        """Compare the counts with `table_pages`, which names a page once for each table that holds it.

        Raises AssertionError where they differ.
        """
        counted = np.bincount(table_pages, minlength=self.num_pages)
        assert len(counted) == self.num_pages, "a table holds a page that does not exist"
        wrong = np.flatnonzero(counted != self.ref_counts)
        assert not len(wrong), f"tables and reference counts differ at pages {wrong[:8]}"
        free = np.sort(self.free_list[: self.num_free])
        assert (np.flatnonzero(self.ref_counts[1:] == 0) + 1 == free).all(), "the free list and the counts differ"
        assert self.ref_counts[0] == 0, "a table holds the trash page"
