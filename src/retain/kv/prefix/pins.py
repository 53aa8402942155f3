"""Pins: nodes of the radix tree that must not be evicted for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from retain.kv.prefix.node import Node


class Pins:
    """Pinned nodes, each until a time of a clock, and who pinned them."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = monotonic  # seconds
        self._until: dict[Node, float] = {}
        self._owners: dict[Node, set[str]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._until)

    def __contains__(self, node: Node) -> bool:
        return node in self._until

    def add(self, nodes: Sequence[Node], seconds: float, owner: str, max_pages: int) -> int:
        """Pin nodes for `seconds`, or longer where they are already pinned for longer.

        Ends at the first that has no room: all pins hold `max_pages` at most, and those of an owner twice as many as
        they leave free. Returns how many of the nodes are pinned.
        """
        until = self.clock() + seconds
        own = sum(node.num_pages for node in self._until if owner in self._owners[node])
        total = sum(node.num_pages for node in self._until)
        for i, node in enumerate(nodes):
            if owner not in self._owners.get(node, ()):
                own += node.num_pages
                total += node.num_pages * (node not in self._until)
                if own > 2 * (max_pages - total):
                    return i
            self._until[node] = max(until, self._until.get(node, 0.0))
            self._owners.setdefault(node, set()).add(owner)
        return len(nodes)

    def inherit(self, node: Node, source: Node) -> None:
        """Pin a node at least as long as the node that it takes tokens from."""
        if source in self._until:
            self._until[node] = max(self._until[source], self._until.get(node, 0.0))
            self._owners[node] = self._owners.get(node, set()) | self._owners[source]

    def discard(self, node: Node) -> None:
        """Remove the pin of a node, which may then be evicted."""
        self._until.pop(node, None)
        self._owners.pop(node, None)

    def expire(self) -> None:
        """Unpin the nodes whose time is over."""
        if self._until:
            now = self.clock()
            self._until = {node: until for node, until in self._until.items() if until > now}
            self._owners = {node: self._owners[node] for node in self._until}

    def clear(self) -> None:
        """Remove the pins of all nodes, which may then be evicted."""
        self._until = {}
        self._owners = {}
