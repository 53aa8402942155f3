"""A pass that leaves out the head of a model, for one that embeds texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from retain.kernels.ops import LOGITS, Buffer, GatherRows, MatMul, Operation


def headless(
    operations: Iterable[Operation], hidden_size: int, vocab_size: int, dtype: torch.dtype
) -> Iterator[Operation]:
    """Return all operations but those of the head; the states that it would read are what the program returns.

    A head that changes nothing takes its place. Raises ValueError for a model with more hidden numbers than tokens:
    what it returns would not fit where logits go.
    """
    if hidden_size > vocab_size:
        raise ValueError(f"a model with more hidden numbers ({hidden_size}) than tokens cannot embed: see --pooling")
    return _replace_head(operations, dtype)


def _replace_head(operations: Iterable[Operation], dtype: torch.dtype) -> Iterator[Operation]:
    """Yield operations up to the first one behind the last state, then an identity."""
    last = None
    for op in operations:
        if last is not None and op.out != last:
            break
        yield op
        if isinstance(op, GatherRows):
            last = op.out
    assert last is not None
    yield MatMul(last, Buffer(LOGITS, last.width), torch.eye(last.width, dtype=dtype))
