"""A pass that lets a draft head cache all tokens of a step: its keys follow from a token and the state before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from retain.kernels.ops import Buffer, GatherRows, Operation
from retain.models.layers import Layer


class CachedHead(Protocol):
    """A draft head whose layer is a cache of the target."""

    def write(self, states: Buffer) -> Iterator[Operation]:
        """Yield what caches all fresh tokens of a step, by the target's hidden states of all of them."""


def observe(operations: Iterable[Operation], norm: Layer, head: CachedHead) -> Iterator[Operation]:
    """Return all operations of a target, and those of a head before rows are gathered. `norm` is the target's last."""
    for op in operations:
        if isinstance(op, GatherRows):
            states = Buffer("hidden states of all tokens", op.x.width)
            yield from norm.emit(op.x, states)
            yield from head.write(states)
        yield op
        del op
