"""What the prefix tree is made of. What is not known here: who looks for it, who has to go."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retain.kv.memory.sliding_windows import SlidingWindows

Ints = NDArray[np.int32]


class EvictionRecord(NamedTuple):
    """Of a node that was evicted, or some of it."""

    num_pages: int
    age: float  # seconds
    idle: float  # seconds since somebody began with it
    hits: int  # who did


@dataclass(eq=False)
class Node:
    """A span from page `begin` of its text on. A node of less than a page is a leaf."""

    start_page: int
    tokens: Ints  # [n * page_size], or fewer than one page
    block_hashes: list[bytes]  # of each of its pages
    pages: Ints  # [M, G, n]
    sliding_windows: SlidingWindows | None = None  # of its end
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first link
    last_used: int = 0  # when, on the tree's clock
    created_at: float = field(default_factory=monotonic)  # seconds
    last_hit_at: float = 0.0  # when somebody began with it
    hits: int = 0  # who did

    def record_hit(self) -> None:
        """Somebody begins with it, or may."""
        self.hits, self.last_hit_at = self.hits + 1, monotonic()

    def to_eviction_record(self) -> EvictionRecord:
        """How it was, now that it ends."""
        now = monotonic()
        return EvictionRecord(
            self.all_pages.size, now - self.created_at, now - (self.last_hit_at or self.created_at), self.hits
        )

    @property
    def all_pages(self) -> Ints:
        """All its pages."""
        rings = [p.ravel() for p in self.sliding_windows.pages] if self.sliding_windows else []
        return np.concatenate([self.pages.ravel(), *rings])


@dataclass(frozen=True)
class PrefixMatch:
    """The first `length` tokens of a text are there. `common`: as many agree, but sliding layers cannot go on there."""

    length: int
    pages: Ints  # [M, G, n], of all that agree, the last one perhaps only in part
    sliding_windows: SlidingWindows | None
    common_length: int
