"""Pages: who owns them. Numbers only; the bytes are the kernels'.

A page is free, or held by one or more tables. Page 0 is the trash page and is nobody's. What is not known here:
layers, heads, tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class OutOfPagesError(ValueError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """`n_pages` pages of one size, page 0 apart."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.ref_counts = np.zeros(num_pages, np.int32)  # tables that hold each page
        self.free_list = np.arange(
            num_pages - 1, 0, -1, dtype=np.int32
        )  # free pages are stack[:free], the last given first out
        self.num_free = num_pages - 1
        self.peak_used = 0  # most pages in use at once, since the start
        self.evict_callback: Callable[[int], None] | None = (
            None  # who holds pages that nobody needs, and gives so many back
        )

    @property
    def num_used(self) -> int:
        """Pages held."""
        return self.num_pages - 1 - self.num_free

    def ensure_free(self, n: int) -> bool:
        """Whether n pages are free, if need be after those were asked that can give some back."""
        if n > self.num_free and self.evict_callback:
            self.evict_callback(n - self.num_free)
        return n <= self.num_free

    def allocate(self, n: int) -> Pages:
        """n free pages, now held once. Raises OutOfPages and takes none when there are fewer."""
        if n > self.num_free:
            raise OutOfPagesError(f"{n} pages wanted, {self.num_free} free")
        self.num_free -= n
        pages = self.free_list[self.num_free : self.num_free + n].copy()
        self.ref_counts[pages] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages

    def incref(self, pages: Pages) -> None:
        """One more table holds these pages (each named once)."""
        self.ref_counts[pages] += 1

    def free(self, pages: Pages) -> None:
        """One table less holds these pages (each named once); those that nobody holds are free."""
        self.ref_counts[pages] -= 1
        freed = pages[self.ref_counts[pages] == 0]
        self.free_list[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def check(self, table_pages: Pages) -> None:
        """The accountant: `held` names every page once for each table that holds it. Raises AssertionError."""
        refs = np.bincount(table_pages, minlength=self.num_pages)
        assert len(refs) == self.num_pages, "a table holds a page that does not exist"
        assert (refs == self.ref_counts).all(), (
            f"held and counted differ at pages {np.flatnonzero(refs != self.ref_counts)[:8]}"
        )
        free = np.sort(self.free_list[: self.num_free])
        assert (np.flatnonzero(self.ref_counts[1:] == 0) + 1 == free).all(), (
            "free pages are not those that nobody holds"
        )
        assert self.ref_counts[0] == 0, "somebody holds the trash page"
