"""A pass that leaves out the head of a model, for one that embeds texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from retain.kernels.ops import LOGITS, Buffer, MatMul, Operation
from retain.models.passes.head_split import with_states


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
    """Yield operations up to the first of the head, then an identity."""
    for op, states in with_states(operations):
        if states is not None:
            yield MatMul(states, Buffer(LOGITS, states.width), torch.eye(states.width, dtype=dtype))
            return
        yield op
        del op
