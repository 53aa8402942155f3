"""What the slots of pages hold."""

import torch
from torch import Tensor

from retain.kernels.api import KV, Backend


def read_pages(backend: Backend, kv: KV, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of pages int64 [n] in float32, each [n, S, D]."""
    return backend.read_slots(kv, pages[:, None] * kv.page_size + torch.arange(kv.page_size))
