"""What the radix tree evicts first: what saves the fewest tokens per page, and was used the longest ago.

Leaves and snapshots compete. A leaf saves its tokens. A snapshot saves those from the snapshot before it: without it a
text would go on from there. So pages of a text and snapshots never starve each other, and among leaves of texts that
need no snapshots the order is that of their last use.
"""

from __future__ import annotations

from collections.abc import Iterable

from retain.kv.prefix.node import Node


def candidates(roots: Iterable[Node], page_size: int, now: int) -> list[tuple[float, int, Node]]:
    """Return the leaves, and the other nodes with a snapshot: their values at `now` on the tree's clock, and numbers.

    They can be ordered: numbers differ.
    """
    found: list[tuple[float, int, Node]] = []
    stack: list[tuple[Node, int | None]] = []
    for root in roots:
        begin = 0 if root.needs_snapshot else None
        stack += [(child, begin) for child in root.children.values()]
    while stack:
        node, resumes_at = stack.pop()
        children = node.children
        if not children:
            if resumes_at is None and node.pages.size:  # most nodes of most trees: no calls
                value = len(node.tokens) / (node.pages.size * (now - node.last_used))
            else:
                value = _leaf_value(node, resumes_at, page_size, now)
            found.append((value, len(found), node))
            continue
        if node.snapshot:
            end = node.start_page * page_size + len(node.tokens)
            saved = end - (resumes_at or 0)
            value = _value(saved, node.snapshot.num_pages, now - node.snapshot_used)
            found.append((value, len(found), node))
            resumes_at = end
        for child in children.values():
            stack.append((child, resumes_at))
    return found


def leaf_value(node: Node, page_size: int, now: int) -> float:
    """Return the value of a node that has become a leaf."""
    before = node.parent
    while before and before.parent and not before.snapshot:
        before = before.parent
    resumes_at: int | None = None
    if before and (before.snapshot or before.needs_snapshot):
        resumes_at = before.start_page * page_size + len(before.tokens)
    return _leaf_value(node, resumes_at, page_size, now)


def _leaf_value(leaf: Node, resumes_at: int | None, page_size: int, now: int) -> float:
    """Return the value of a leaf. It saves all its tokens, or those from where a text could go on without it.

    `resumes_at`: where the last snapshot before the leaf is; None where texts need none.
    """
    saved = len(leaf.tokens)
    if resumes_at is not None:
        saved = leaf.start_page * page_size + saved - resumes_at if leaf.snapshot else 0
    return _value(saved, leaf.num_pages, now - leaf.last_used)


def _value(saved_tokens: int, num_pages: int, age: int) -> float:
    return saved_tokens / (max(num_pages, 1) * max(age, 1))
