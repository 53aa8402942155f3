"""Nodes of the radix tree, and the result of a look-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np

from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints


class EvictionRecord(NamedTuple):
    """How a node was used before it was evicted, whole or in part."""

    num_pages: int
    age: float  # seconds since it was created
    idle: float  # seconds since a request last began with it
    hits: int  # requests that began with it


@dataclass(eq=False)
class Node:
    """A span of a text from page `start_page` on. A node of less than a page is a leaf."""

    start_page: int
    tokens: Ints  # [n * page_size], or fewer than one page
    block_hashes: list[bytes]  # of each of its pages
    pages: Ints  # [K, n]: a column for each block, see block_layout.py
    sliding_windows: SlidingWindows | None = None  # at its end
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first block hash
    last_used: int = 0  # on the tree's clock
    created_at: float = field(default_factory=monotonic)  # seconds
    last_hit_at: float = 0.0
    hits: int = 0

    def record_hit(self) -> None:
        """Count a request that begins with this node."""
        self.hits = self.hits + 1
        self.last_hit_at = monotonic()

    def to_eviction_record(self) -> EvictionRecord:
        """Summarize the node when it is evicted."""
        now = monotonic()
        used_at = self.last_hit_at or self.created_at
        return EvictionRecord(self.num_pages, now - self.created_at, now - used_at, self.hits)

    @property
    def num_pages(self) -> int:
        """How many pages of all layers the node holds."""
        windows = self.sliding_windows.pages if self.sliding_windows else ()
        return self.pages.size + sum(pages.size for pages in windows)

    @property
    def all_pages(self) -> Ints:
        """Pages of all layers, flat."""
        windows = [p.ravel() for p in self.sliding_windows.pages] if self.sliding_windows else []
        return np.concatenate([self.pages.ravel(), *windows])


@dataclass(frozen=True)
class PrefixMatch:
    """The first `length` tokens of a text, as the tree has them.

    `common_length` tokens agree; more than `length` where sliding layers cannot resume at the end of them.
    """

    length: int
    pages: Ints  # [K, n], of all tokens that agree; the last page may agree only in part
    sliding_windows: SlidingWindows | None
    common_length: int
