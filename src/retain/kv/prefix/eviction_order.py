"""What the radix tree evicts first: what saves the fewest tokens per page, and was used the longest ago.

Pages at the end of texts and checkpoints compete. Pages save their tokens. A checkpoint saves those from the one of its
key before it: without it a text would go on from there. So pages and checkpoints never starve each other, and among
the ends of texts that need no checkpoints the order is that of their last use.

The time since the last use stands for the time until the next. Where that is known better (returns.py), it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from retain.kv.prefix.node import Node


class EvictionCandidate(NamedTuple):
    """A checkpoint of a node, by its key, or its pages (b"") with the checkpoints that go with them.

    Candidates can be ordered: by value, then by number, which differ.
    """

    value: float
    number: int
    node: Node
    key: bytes


class Ages(NamedTuple):
    """The time on the tree's clock, which ticks with uses; the same in seconds, and how many ticks a second has."""

    now: int
    seconds: float = 0.0
    rate: float = 1.0

    def of(self, node: Node, last_used: int) -> float:
        """Return for how long a node is not used, about: in ticks."""
        if node.expected:
            return self.rate * node.expected.remaining(self.seconds)
        return self.now - last_used


def candidates(roots: Iterable[Node], block_size: int, ages: Ages) -> list[EvictionCandidate]:
    """Return what can be evicted, with its value now."""
    found: list[EvictionCandidate] = []
    # Nodes with the positions of the last checkpoints before them, by key, and where texts last go on (None: anywhere).
    stack: list[tuple[Node, dict[bytes, int], int | None]] = []
    for root in roots:
        stack += [(child, {}, 0 if root.required else None) for child in root.children.values()]
        required = root.required
        while stack:
            node, last, resumes_at = stack.pop()
            is_leaf = node.is_pages_leaf
            if is_leaf and resumes_at is None and not node.checkpoints and node.pages.size:  # most nodes of most trees
                value = _value(len(node.tokens), node.pages.size, ages.of(node, node.last_used))
                found.append(EvictionCandidate(value, len(found), node, b""))
            elif is_leaf:
                found.append(
                    EvictionCandidate(_leaf_value(node, required, resumes_at, block_size, ages), len(found), node, b"")
                )
            if node.checkpoints:
                end = node.start_block * block_size + len(node.tokens)
                for key, checkpoint in node.checkpoints.items():
                    if len(checkpoint.page_list) and not (is_leaf and checkpoint.needs_pages):
                        before = (resumes_at if key in required else last.get(key)) or 0
                        age = ages.of(node, node.checkpoint_used[key])
                        value = _value(end - before, len(checkpoint.page_list), age)
                        found.append(EvictionCandidate(value, len(found), node, key))
                last = last | dict.fromkeys(node.checkpoints, end)
                if required and required <= node.checkpoints.keys():
                    resumes_at = end
            for child in node.children.values():
                stack.append((child, last, resumes_at))
    return found


def leaf_value(node: Node, block_size: int, ages: Ages) -> float:
    """Return the value of the pages of a node behind which no others are any more."""
    root = node.root
    before = node.parent
    while before and before.parent and not (root.required and root.required <= before.checkpoints.keys()):
        before = before.parent
    resumes_at = before.start_block * block_size + len(before.tokens) if before and root.required else None
    return _leaf_value(node, root.required, resumes_at, block_size, ages)


def _leaf_value(leaf: Node, required: frozenset[bytes], resumes_at: int | None, block_size: int, ages: Ages) -> float:
    """Return the value of a leaf's pages. They save all its tokens, or those from where a text could go on without it.

    `resumes_at`: the end of the last node before it from which texts can; None where they can from anywhere.
    """
    saved = len(leaf.tokens)
    if resumes_at is not None:
        saved = leaf.start_block * block_size + saved - resumes_at if required <= leaf.checkpoints.keys() else 0
    num_pages = int((leaf.pages > 0).sum()) + sum(len(c.page_list) for c in leaf.dependents.values())
    return _value(saved, num_pages, ages.of(leaf, leaf.last_used))


def _value(saved_tokens: int, num_pages: int, age: float) -> float:
    return saved_tokens / (max(num_pages, 1) * max(age, 1))
