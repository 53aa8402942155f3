"""A pass that lets the tokens of a step name adapters (LoRA), whose products are added to those of linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from retain.kernels.ops import GatherRows, MatMul, Operation
from retain.models.adapter_bank import AdapterBank


def adapt(operations: Iterable[Operation], bank: AdapterBank) -> Iterator[Operation]:
    """Return all operations, and behind each product of layers that a checkpoint names, what adds adapters.

    Behind `GatherRows` there is nothing more: rows are no longer those of all tokens.
    """
    is_gathered = False
    for op in operations:
        yield op
        is_gathered |= isinstance(op, GatherRows)
        if isinstance(op, MatMul) and not is_gathered:
            first = 0
            for rows in op.rows:
                if added := bank.make_operation(op, rows, first):
                    yield added
                first += rows.num_rows
        del op
