"""The memory of a pool as pages of another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.pool_dtypes import key_bytes, tensor_dtypes, value_bytes


def reinterpret_bytes(kv: KV, dtype: torch.dtype, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the first bytes of each page of K and V, as many as pages of this dtype and size have: views [P, bytes].

    Raises ValueError if a page of the pool has fewer.
    """
    sizes = key_bytes(kv.k_dim, dtype), value_bytes(kv.v_dim, dtype)
    if any(x[0].nbytes < page_size * size for x, size in zip((kv.k, kv.v), sizes, strict=True)):
        raise ValueError(f"a page of {kv.page_size} slots in {kv.dtype} cannot hold {page_size} slots in {dtype}")
    k, v = (
        x.flatten(1).view(torch.uint8)[:, : page_size * size].view(t)
        for x, size, t in zip((kv.k, kv.v), sizes, tensor_dtypes(dtype), strict=True)
    )
    return k, v
