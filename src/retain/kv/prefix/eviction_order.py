"""What the radix tree evicts first: what saves the fewest tokens per page, and was used the longest ago.

Leaves and snapshots compete. A leaf saves its tokens. A snapshot saves those from the snapshot before it: without it a
text would go on from there. So pages of a text and snapshots never starve each other, and among leaves of texts that
need no snapshots the order is that of their last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kv.prefix.node import Node


def candidates(roots: Iterable[Node], page_size: int, now: int) -> Iterator[tuple[float, Node]]:
    """Yield the leaves, and the other nodes with a snapshot, each with its value at `now` on the tree's clock."""
    stack: list[tuple[Node, int | None]] = []
    for root in roots:
        begin = 0 if root.needs_snapshot else None
        stack += [(child, begin) for child in root.children.values()]
    while stack:
        node, resumes_at = stack.pop()
        end = node.start_page * page_size + len(node.tokens)
        if not node.children:
            yield _value(_saved_tokens(node, end, resumes_at), node.num_pages, now - node.last_used), node
            continue
        if node.snapshot:
            yield _value(end - (resumes_at or 0), node.snapshot.num_pages, now - node.snapshot_used), node
            resumes_at = end
        stack += [(child, resumes_at) for child in node.children.values()]


def leaf_value(node: Node, page_size: int, now: int) -> float:
    """Return the value of a node that has become a leaf."""
    end = node.start_page * page_size + len(node.tokens)
    before = node.parent
    while before and before.parent and not before.snapshot:
        before = before.parent
    resumes_at: int | None = None
    if before and (before.snapshot or before.needs_snapshot):
        resumes_at = before.start_page * page_size + len(before.tokens)
    return _value(_saved_tokens(node, end, resumes_at), node.num_pages, now - node.last_used)


def _saved_tokens(leaf: Node, end: int, resumes_at: int | None) -> int:
    """Return the tokens that a leaf saves: all, or those from where a text could go on without it.

    `resumes_at`: where the last snapshot before the leaf is; None where texts need none.
    """
    if resumes_at is None:
        return len(leaf.tokens)
    return end - resumes_at if leaf.snapshot else 0


def _value(saved_tokens: int, num_pages: int, age: int) -> float:
    return saved_tokens / (max(num_pages, 1) * max(age, 1))
