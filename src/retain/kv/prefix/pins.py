"""Pins: nodes of the radix tree that must not be evicted for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic

from retain.kv.prefix.node import Node


class Pins:
    """Pinned nodes, each until a time of the monotonic clock (seconds)."""

    def __init__(self) -> None:
        self._until: dict[Node, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._until)

    def __contains__(self, node: Node) -> bool:
        return node in self._until

    def add(self, nodes: Iterable[Node], seconds: float) -> None:
        """Pin nodes for `seconds`, or longer if they are already pinned for longer."""
        until = monotonic() + seconds
        self._until |= {node: max(until, self._until.get(node, 0.0)) for node in nodes}

    def inherit(self, node: Node, source: Node) -> None:
        """Pin a node at least as long as the node that it takes tokens from."""
        if source in self._until:
            self._until[node] = max(self._until[source], self._until.get(node, 0.0))

    def discard(self, node: Node) -> None:
        """Unpin a node."""
        self._until.pop(node, None)

    def expire(self) -> None:
        """Unpin the nodes whose time is over."""
        if self._until:
            now = monotonic()
            self._until = {node: until for node, until in self._until.items() if until > now}

    def clear(self) -> None:
        """Unpin all nodes."""
        self._until = {}
