"""Nodes of the radix tree, and the result of a look-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import numpy as np

from retain.kv.checkpoints import TextCheckpoint
from retain.kv.prefix.returns import ExpectedReturn
from retain.kv.text import NO_KEYING, Keying
from retain.types import Ints

NO_PAGES: Ints = np.zeros(0, np.int32)
NO_BLOCKS: Ints = np.zeros((0, 0), np.int32)


class EvictionRecord(NamedTuple):
    """How a node was used before its pages were evicted, all or some of them."""

    num_pages: int
    age: float  # seconds since it was created
    idle: float  # seconds since a request last began with it
    hits: int  # requests that began with it


@dataclass(eq=False)
class Node:
    """Tokens of a text from block `start_block` on: whole blocks, or, in a tail, the first tokens of one.

    It holds the pages of these blocks, checkpoints at its end, both, or neither where a later part of the text does.
    A node with pages has a parent with pages.
    """

    start_block: int
    tokens: Ints  # [n * block_size], or fewer than one block
    block_hashes: list[bytes]  # of each of its blocks
    has_pages: bool = False
    pages: Ints = field(default_factory=lambda: NO_BLOCKS)  # [K, n] of its n blocks; 0: none, see block_layout.py
    checkpoints: dict[bytes, TextCheckpoint] = field(default_factory=dict)  # at its end, by key
    checkpoint_used: dict[bytes, int] = field(default_factory=dict)  # on the tree's clock: the last use of each
    required: frozenset[bytes] = frozenset()  # of a root: keys of the checkpoints without which no text goes on
    keying: Keying = NO_KEYING  # of its tokens
    salt_digest: bytes = b""  # of a root: see `text.salt_digest`
    expected: ExpectedReturn | None = None  # when its text is asked for again, where that is known
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)  # by their first block hash
    last_used: int = 0  # on the tree's clock
    created_at: float = field(default_factory=monotonic)  # seconds
    last_hit_at: float = 0.0
    hits: int = 0
    is_branch: bool = False  # whether texts parted at its end, since then

    def split(self, num_blocks: int, block_size: int) -> Node:
        """Give the first blocks to a new parent, which takes this node's place. Returns it."""
        assert self.parent
        cut = num_blocks * block_size
        upper = Node(
            start_block=self.start_block,
            tokens=self.tokens[:cut],
            block_hashes=self.block_hashes[:num_blocks],
            has_pages=self.has_pages,
            pages=self.pages[:, :num_blocks],
            keying=self.keying,
            parent=self.parent,
            last_used=self.last_used,
            created_at=self.created_at,
            last_hit_at=self.last_hit_at,
            hits=self.hits,
            expected=self.expected,
        )
        self.parent.children[self.block_hashes[0]] = upper
        self.start_block += num_blocks
        self.tokens = self.tokens[cut:]
        self.block_hashes = self.block_hashes[num_blocks:]
        self.pages = self.pages[:, num_blocks:]
        self.parent = upper
        upper.children[self.block_hashes[0]] = self
        return upper

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
    def root(self) -> Node:
        """The root of the node's tree."""
        node = self
        while node.parent:
            node = node.parent
        return node

    @property
    def is_pages_leaf(self) -> bool:
        """Whether the node has pages, and none of its children has any."""
        return self.has_pages and not any(child.has_pages for child in self.children.values())

    @property
    def num_pages(self) -> int:
        """How many pages of all layers the node holds."""
        return int(np.count_nonzero(self.pages)) + sum(len(c.page_list) for c in self.checkpoints.values())

    @property
    def page_list(self) -> Ints:
        """The pages of its blocks, each named once."""
        found: Ints = self.pages[self.pages > 0]
        return found

    @property
    def all_pages(self) -> Ints:
        """The pages of the node's own blocks and of all its checkpoints, in one array."""
        return np.concatenate([self.page_list, *(c.page_list for c in self.checkpoints.values())])

    @property
    def dependents(self) -> dict[bytes, TextCheckpoint]:
        """Its checkpoints that go with the pages of the text."""
        return {key: c for key, c in self.checkpoints.items() if c.needs_pages}


class NodeEnd(NamedTuple):
    """A node with checkpoints on the way of a text, `reach` of whose tokens are those up to the node's end, at most."""

    node: Node
    reach: int


@dataclass(frozen=True)
class PrefixMatch:
    """What the tree has of a text: pages of the first `length` tokens, and nodes with checkpoints.

    `common_length` tokens agree with those of cached texts, with pages or without.
    """

    length: int
    pages: Ints  # [K, n] of n blocks; the last one may agree only in part
    nodes: Sequence[Node]  # that hold these pages
    ends: Sequence[NodeEnd]
    common_length: int

    def checkpoints(self, key: bytes) -> Iterator[tuple[TextCheckpoint, NodeEnd]]:
        """Yield the checkpoints of this key from which the text can go on, each with its place."""
        for end in self.ends:
            found = end.node.checkpoints.get(key)
            if found and found.resumes_from <= end.reach:
                yield found, end


NO_MATCH = PrefixMatch(0, NO_BLOCKS, (), (), 0)
