"""A pass that makes a program give hidden states, too: what its head reads of each token whose logits are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kernels.head_columns import HeadColumns
from retain.kernels.ops import HIDDEN_STATES, Buffer, CopyColumns, GatherRows, Operation


def tap(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Return all operations, with a copy of the states behind the final norm, where the head begins."""
    last = None
    for op in operations:
        if last is not None and op.out != last:
            columns = HeadColumns(1, last.width, last.width)
            yield CopyColumns(last, Buffer(HIDDEN_STATES, last.width), columns, columns)
            last = None
        yield op
        if isinstance(op, GatherRows):
            last = op.out
        del op  # its weights may be freed before the next ones are read
