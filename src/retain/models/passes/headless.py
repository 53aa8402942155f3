"""A pass that leaves out the head of a model, for one that embeds texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from retain.kernels.ops import LOGITS, Buffer, GatherRows, MatMul, Operation


def headless(operations: Iterable[Operation], dtype: torch.dtype) -> Iterator[Operation]:
    """Yield all operations but those of the head; the states that it would read are what the program returns.

    A head that changes nothing takes its place. Raises ValueError for a model with more hidden numbers than tokens:
    what it returns would not fit where logits go.
    """
    last = None
    for op in operations:
        if last is None or op.out == last:
            yield op
            last = op.out if isinstance(op, GatherRows) else last
            continue
        if op.out.name == LOGITS and last.width > op.out.width:
            raise ValueError(f"a model with more hidden numbers ({last.width}) than tokens cannot embed: see --pooling")
    assert last is not None
    yield MatMul(last, Buffer(LOGITS, last.width), torch.eye(last.width, dtype=dtype))
