"""A pass that makes a program give hidden states, too: what its head reads of each token whose logits are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kernels.ops import HIDDEN_STATES, Buffer, Operation
from retain.models.layers import copy_row
from retain.models.passes.head_split import with_states


def tap(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Return all operations, with a copy of the states behind the final norm, where the head begins."""
    for op, states in with_states(operations):
        if states is not None:
            yield copy_row(states, Buffer(HIDDEN_STATES, states.width))
        yield op
        del op
