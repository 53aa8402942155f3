"""A pass that writes the slots of a draft head for all tokens of a step: they follow from a token and a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from retain.kernels.ops import HIDDEN_STATES, Buffer, GatherRows, Operation
from retain.models.heads import Restrict


class CachedHead(Protocol):
    """A draft head whose layer is a cache of the target. It drafts by a program of its own."""

    @property
    def hidden_size(self) -> int:
        """Numbers of the state that it reads of each token."""

    @property
    def restrict(self) -> Restrict | None:
        """What its logits become, see `DraftHead`."""

    def emit_states(self, x: Buffer, states: Buffer) -> Iterator[Operation]:
        """Yield what computes the states of all tokens, by what comes out of the target's last layer."""

    def emit_writes(self, states: Buffer) -> Iterator[Operation]:
        """Yield what caches all fresh tokens of a step, by their states."""

    def emit(self) -> Iterator[Operation]:
        """Yield the operations of the program that computes one token of each request."""


def write_head(operations: Iterable[Operation], head: CachedHead) -> Iterator[Operation]:
    """Return all operations of a target, and before rows are gathered those that write a head's slots.

    The program gives the states that the head reads.
    """
    for op in operations:
        if isinstance(op, GatherRows):
            states = Buffer("hidden states of all tokens", head.hidden_size)
            yield from head.emit_states(op.x, states)
            yield from head.emit_writes(states)
            yield GatherRows(states, Buffer(HIDDEN_STATES, head.hidden_size))
        yield op
        del op
