"""Where a head begins in a stream of operations; passes that leave it out, or read what it reads, share this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kernels.ops import Buffer, GatherRows, Operation


def with_states(operations: Iterable[Operation]) -> Iterator[tuple[Operation, Buffer | None]]:
    """Yield each operation, and with the first of the head the buffer of the states that it reads; else None."""
    states: Buffer | None = None
    for op in operations:
        begins = states is not None and op.out != states
        yield op, states if begins else None
        states = op.out if isinstance(op, GatherRows) else None if begins else states
        del op  # its weights may be freed before the next ones are read
