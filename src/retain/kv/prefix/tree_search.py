"""Finding texts in a radix tree. Nothing here changes it, or counts as a use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retain.kv.prefix.node import NO_BLOCKS, Node, NodeEnd, PrefixMatch
from retain.kv.text import Keying, Text, common_prefix_length
from retain.types import Ints

MAX_LACKING = 4  # tokens at the end of a text that were not computed, such as those that end an answer


@dataclass(frozen=True)
class TreeSearch:
    """Searches below the root of a text's tree, whose first link the text's hashes begin with."""

    block_size: int

    def match(self, root: Node, link: bytes, text: Text, max_length: int) -> PrefixMatch:
        """Return what a tree has of the first `max_length` tokens of a text."""
        B = self.block_size
        tokens = text.tokens[:max_length]
        path, num_full = self.walk(root, text.block_hashes(link, B, max_length))
        partial = self.partial_matches(path, num_full, tokens, text.keying)
        common = num_full * B + (partial[0][1] if partial else 0)
        ends = [NodeEnd(n, min(num_full * B, self.end_position(n))) for n, _ in path if n.checkpoints]
        ends += [NodeEnd(n, min(num_full * B + k, self.end_position(n))) for n, k in partial if n.checkpoints]
        ends += [
            NodeEnd(n, self.end_position(n)) for n in self._passed_ends(path, tokens, text.keying) if n.checkpoints
        ]
        with_pages = [(node, n) for node, n in path if node.has_pages]
        num_blocks = sum(n for _, n in with_pages)
        if len(with_pages) < len(path):
            partial = self.partial_matches(with_pages, num_blocks, tokens, text.keying)
        tail, num_equal = next(((n, k) for n, k in partial if n.has_pages), (None, 0))
        if tail is with_pages[-1][0]:
            with_pages[-1] = tail, with_pages[-1][1] + 1
        elif tail:
            with_pages.append((tail, 1))
        nodes = [node for node, _ in with_pages]
        pages = [node.pages[:, :n] for node, n in with_pages if node.parent]
        blocks = np.concatenate(pages, -1) if pages else NO_BLOCKS
        return PrefixMatch(num_blocks * B + num_equal, blocks, nodes, ends, common)

    def nearest_text(self, root: Node, link: bytes, text: Text, key: bytes) -> tuple[Ints, int] | None:
        """Return the cached text that shares the most first tokens, and their number.

        Only texts that have pages count, or, where a key is given, a checkpoint of that key at their end.
        """
        if not _is_text(root, key):
            return None
        path, _ = self.walk(root, text.block_hashes(link, self.block_size))
        path = [(node, n) for node, n in path if node is root or _is_text(node, key)]
        num_full = sum(n for _, n in path)
        partial = self.partial_matches(path, num_full, text.tokens, text.keying)
        longest = [x for x in partial if _is_text(x[0], key)][:1]
        node, num_equal = longest[0] if longest else (path[-1][0], 0)
        spans = [n.tokens for n, _ in path if n is not node] + [node.tokens]
        while children := [child for child in children_of(node) if _is_text(child, key)]:
            node = max(children, key=lambda n: n.last_used)
            spans.append(node.tokens)
        return np.concatenate(spans), num_full * self.block_size + num_equal

    def own_end(self, root: Node, link: bytes, text: Text, with_continuation: bool = False) -> list[Node]:
        """Return the nodes that a text alone needs, its end first; none where the tree lacks it, or others go on there.

        Of the text up to MAX_LACKING tokens may be missing, or its last block where no other goes on: tiers have whole
        ones. What continues it counts `with_continuation` as its own, unless it goes on in several ways.
        """
        path, num_full = self.walk(root, text.block_hashes(link, self.block_size))
        node, n = path[-1]
        num_left = len(text) - num_full * self.block_size
        partial = self.partial_matches(path, num_full, text.tokens, text.keying)
        # The text ends in a longer node, or a tail ends with it.
        ends = [c for c, k in partial if k == num_left or (k == len(c.tokens) and num_left - k <= MAX_LACKING)]
        if ends:
            node = ends[0]
        elif n < len(node.block_hashes) or num_left > (MAX_LACKING if node.children else self.block_size - 1):
            return []
        is_longer = self.end_position(node) > len(text)
        if is_longer and not with_continuation:
            return []
        while with_continuation and len(node.children) == 1:
            (node,) = node.children.values()
        found: list[Node] = []
        while node.parent and len(node.children) == (1 if found else 0):
            found.append(node)
            node = node.parent
        return found

    def walk(self, root: Node, block_hashes: Sequence[bytes]) -> tuple[list[tuple[Node, int]], int]:
        """Follow block hashes from the root. Returns each node with its number of matched blocks, and their sum."""
        path = [(root, 0)]
        at = 0
        while at < len(block_hashes) and (child := path[-1][0].children.get(block_hashes[at])):
            n = _num_equal(child.block_hashes, block_hashes[at : at + len(child.block_hashes)])
            path.append((child, n))
            at += n
            if n < len(child.block_hashes):
                break
        return path, at

    def partial_matches(
        self, path: Sequence[tuple[Node, int]], num_blocks: int, tokens: Ints, keying: Keying
    ) -> list[tuple[Node, int]]:
        """Return the nodes that have a beginning of the block after a path, and its length; the longest first."""
        B = self.block_size
        node, n = path[-1]
        begin = num_blocks * B
        rest = tokens[begin:]
        is_inside = n < len(node.block_hashes)
        blocks = (
            [(node, node.tokens[n * B : (n + 1) * B])] if is_inside else [(c, c.tokens[:B]) for c in children_of(node)]
        )
        equal = [(c, n) for c, block in blocks if (n := common_prefix_length(block, rest))]
        found = [(c, num_shared) for c, n in equal if (num_shared := keying.count_shared(c.keying, begin, n))]
        return sorted(found, key=lambda x: (-x[1], not x[0].checkpoints))

    def _passed_ends(self, path: Sequence[tuple[Node, int]], tokens: Ints, keying: Keying) -> Iterator[Node]:
        """Yield the tails that lie on a path: texts that a longer one has repeated."""
        for parent, n in path:
            begin = self.end_position(parent)
            for node in children_of(parent) if n == len(parent.block_hashes) else ():
                n = len(node.tokens)
                is_tail = n % self.block_size and begin + n <= len(tokens)
                is_equal = is_tail and np.array_equal(node.tokens, tokens[begin : begin + n])
                if is_equal and keying.count_shared(node.keying, begin, n) == n:
                    yield node

    def end_position(self, node: Node) -> int:
        """Return the number of tokens of the text up to the node's end."""
        return node.start_block * self.block_size + len(node.tokens)


def _num_equal(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Return how many of the first hashes are equal. Hashes are chained: those before an equal one are equal, too."""
    n = min(len(a), len(b))
    return n if n and a[n - 1] == b[n - 1] else bisect_left(range(n), 1, key=lambda i: int(a[i] != b[i]))


def _is_text(node: Node, key: bytes) -> bool:
    """Return whether a node is of a text with pages, or, where a key is given, of one with a checkpoint of it."""
    if not key:
        return node.has_pages
    return key in node.checkpoints or any(_is_text(child, key) for child in node.children.values())


def nodes_below(root: Node) -> Iterator[Node]:
    """Iterate over all nodes of a tree but its root."""
    stack = children_of(root)
    while stack:
        node = stack.pop()
        yield node
        stack += children_of(node)


def children_of(node: Node) -> list[Node]:
    """Return the children of a node, which may then change."""
    return list(node.children.values())
