"""Pages: who owns them. Numbers only; the bytes are the kernels'.

A page is free, or held by one or more tables. Page 0 is the trash page and is nobody's. What is not known here:
layers, heads, tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class OutOfPages(ValueError):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class Pool:
    """`n_pages` pages of one size, page 0 apart."""

    def __init__(self, n_pages: int):
        self.n_pages = n_pages
        self.refs = np.zeros(n_pages, np.int32)  # tables that hold each page
        self.stack = np.arange(
            n_pages - 1, 0, -1, dtype=np.int32
        )  # free pages are stack[:free], the last given first out
        self.free = n_pages - 1
        self.peak = 0  # most pages in use at once, since the start
        self.reclaim: Callable[[int], None] | None = None  # who holds pages that nobody needs, and gives so many back

    @property
    def used(self) -> int:
        """Pages held."""
        return self.n_pages - 1 - self.free

    def room(self, n: int) -> bool:
        """Whether n pages are free, if need be after those were asked that can give some back."""
        if n > self.free and self.reclaim:
            self.reclaim(n - self.free)
        return n <= self.free

    def take(self, n: int) -> Pages:
        """n free pages, now held once. Raises OutOfPages and takes none when there are fewer."""
        if n > self.free:
            raise OutOfPages(f"{n} pages wanted, {self.free} free")
        self.free -= n
        pages = self.stack[self.free : self.free + n].copy()
        self.refs[pages] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def share(self, pages: Pages) -> None:
        """One more table holds these pages (each named once)."""
        self.refs[pages] += 1

    def give(self, pages: Pages) -> None:
        """One table less holds these pages (each named once); those that nobody holds are free."""
        self.refs[pages] -= 1
        freed = pages[self.refs[pages] == 0]
        self.stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def check(self, held: Pages) -> None:
        """The accountant: `held` names every page once for each table that holds it. Raises AssertionError."""
        refs = np.bincount(held, minlength=self.n_pages)
        assert len(refs) == self.n_pages, "a table holds a page that does not exist"
        assert (refs == self.refs).all(), f"held and counted differ at pages {np.flatnonzero(refs != self.refs)[:8]}"
        free = np.sort(self.stack[: self.free])
        assert (np.flatnonzero(self.refs[1:] == 0) + 1 == free).all(), "free pages are not those that nobody holds"
        assert self.refs[0] == 0, "somebody holds the trash page"
