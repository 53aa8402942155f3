"""Nodes of the radix tree, and the result of a look-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np

from retain.kv.memory.snapshot import Snapshot
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
    pages: Ints  # [K, n]: a column for each block; 0 is no page, see block_layout.py
    snapshot: Snapshot | None = None  # at its end
    snapshot_used: int = 0  # on the tree's clock: when a text last went on from the snapshot
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first block hash
    last_used: int = 0  # on the tree's clock
    created_at: float = field(default_factory=monotonic)  # seconds
    last_hit_at: float = 0.0
    hits: int = 0
    is_branch: bool = False  # whether texts parted at its end, since then
    needs_snapshot: bool = False  # of a root: whether texts go on from snapshots only

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
        return int(np.count_nonzero(self.pages)) + (self.snapshot.num_pages if self.snapshot else 0)

    @property
    def page_list(self) -> Ints:
        """The pages of its tokens, each named once."""
        found: Ints = self.pages[self.pages > 0]
        return found

    @property
    def all_pages(self) -> Ints:
        """The pages of its tokens and of its snapshot, flat."""
        pages = self.page_list
        return np.concatenate([pages, self.snapshot.page_list]) if self.snapshot else pages


@dataclass(frozen=True)
class PrefixMatch:
    """The first `length` tokens of a text, as the tree has them.

    `common_length` tokens agree; more than `length` where no snapshot is at the end of them.
    """

    length: int
    pages: Ints  # [K, n], of all tokens that agree; the last page may agree only in part
    snapshot: Snapshot | None
    common_length: int
