"""One step as flat tensors: the fresh tokens of all requests, one behind the other.

What is not known here: why these requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retain.engine.scheduler import Share
from retain.kv.cache import Cache


@dataclass(frozen=True)
class Batch:
    """T fresh tokens of B requests, N of which get a new token."""

    ids: Tensor  # int64 [T]
    pos: Tensor  # int32 [T]
    rows: Tensor  # int32 [B]
    starts: Tensor  # int32 [B + 1]
    slots: Tensor  # int32 [L, G, T]
    last: Tensor  # int64 [N]: the last fresh token of each share that pays its whole debt


def collect(shares: Sequence[Share], cache: Cache) -> Batch:
    """The batch of these shares; their pages must be owned already (the scheduler sees to it)."""
    ids = [t for s in shares for t in s.request.tokens[s.request.computed : s.request.computed + s.n]]
    counts = np.array([s.n for s in shares], np.int32)
    starts = np.concatenate(([0], counts.cumsum(dtype=np.int32))).astype(np.int32)  # [B + 1]
    rows = np.array([s.request.row for s in shares], np.int32)  # [B]
    first = np.array([s.request.computed for s in shares], np.int32)
    pos = np.arange(len(ids), dtype=np.int32) + np.repeat(first - starts[:-1], counts)  # [T]
    whole = [b for b, s in enumerate(shares) if s.n == s.request.owed]
    return Batch(
        ids=torch.tensor(ids),
        pos=torch.from_numpy(pos),
        rows=torch.from_numpy(rows),
        starts=torch.from_numpy(starts),
        slots=torch.from_numpy(cache.place(np.repeat(rows, counts), pos)),
        last=torch.from_numpy(starts[1:][whole].astype(np.int64) - 1),
    )
