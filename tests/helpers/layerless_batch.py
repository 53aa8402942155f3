"""A step for programs in which no layer attends: one request's tokens, and a pool that nothing reads."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import CPU, Backend, Batch, GroupInputs, Tables


def make_layerless_batch(backend: Backend, ids: Tensor, choices: Tensor, device: torch.device = CPU) -> Batch:
    """Return a step of the tokens `ids` [T], whose rows `choices` become logits."""
    T = len(ids)
    tables = Tables(
        pages=torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device),
        counts=torch.zeros(1, 1, 1, dtype=torch.int32, device=device),
        windows=torch.zeros(1, 1, dtype=torch.int32, device=device),
        rows=torch.zeros(1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, T], dtype=torch.int32),
    )
    kv = backend.allocate(2, 32, 64, torch.float32, device=device)
    group = GroupInputs(kv, tables, torch.zeros(1, 1, T, dtype=torch.int32, device=device))
    return Batch([group], [(0, 0)], ids, torch.arange(T, dtype=torch.int32), choices)
