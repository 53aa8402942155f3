"""What the prefix tree is made of. What is not known here: who looks for it, who has to go."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Rings:
    """Pages of sliding layers: of each, [G, n], those from page `first` of the text on. They serve texts that go on
    from position `least` or later.
    """

    first: tuple[int, ...]
    pages: tuple[Ints, ...]
    least: int


class Life(NamedTuple):
    """Of a node that was evicted, or some of it."""

    pages: int
    age: float  # seconds
    idle: float  # seconds since somebody began with it
    hits: int  # who did


@dataclass(eq=False)
class Node:
    """A span from page `begin` of its text on. A node of less than a page is a leaf."""

    begin: int
    tokens: Ints  # [n * page_size], or fewer than one page
    links: list[bytes]  # of each of its pages
    pages: Ints  # [M, G, n]
    rings: Rings | None = None  # of its end
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first link
    used: int = 0  # when, on the tree's clock
    born: float = field(default_factory=monotonic)  # seconds
    last: float = 0.0  # when somebody began with it
    hits: int = 0  # who did

    def found(self) -> None:
        """Somebody begins with it, or may."""
        self.hits, self.last = self.hits + 1, monotonic()

    def life(self) -> Life:
        """How it was, now that it ends."""
        now = monotonic()
        return Life(self.held.size, now - self.born, now - (self.last or self.born), self.hits)

    @property
    def held(self) -> Ints:
        """All its pages."""
        rings = [p.ravel() for p in self.rings.pages] if self.rings else []
        return np.concatenate([self.pages.ravel(), *rings])


@dataclass(frozen=True)
class Hit:
    """The first `length` tokens of a text are there. `common`: as many agree, but sliding layers cannot go on there."""

    length: int
    pages: Ints  # [M, G, n], of all that agree, the last one perhaps only in part
    rings: Rings | None
    common: int
