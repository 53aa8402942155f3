"""How the reference reads slots."""

from __future__ import annotations

from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES
from retain.kernels.slots.quantized_slots import from_bytes, rotate


def read_slots(kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of slots in float32."""
    page = slots // kv.page_size
    place = slots % kv.page_size
    k = kv.k[page, place]
    v = kv.v[page, place]
    if kv.dtype in QUANTIZED_DTYPES:
        return rotate(from_bytes(k, kv.k_dim)), from_bytes(v, kv.v_dim)
    return k.float(), v.float()
