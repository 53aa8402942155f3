"""Pages as kernels address them.

A page of K, or of V, is S slots of D numbers. In a pool of int8 the bfloat16 scales of the slots follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.int8_slots import SCALE_BYTES, dequantize, rotate


@dataclass(frozen=True)
class PageArgs:
    """The arguments for the memory of K and V. Where the pool has no scales, k and v stand in for them."""

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor
    constants: dict[str, int | bool]  # PAGE: elements from one page to the next; INT8


def page_elements(page_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a page of K."""
    return page_size * (head_dim + (SCALE_BYTES if dtype == torch.int8 else 0))


def page_args(kv: KV) -> PageArgs:
    """Return the arguments of a pool."""
    is_int8 = kv.dtype == torch.int8
    k_scales, v_scales = (x.view(torch.bfloat16) if is_int8 else x for x in (kv.k, kv.v))
    constants = {"PAGE": page_elements(kv.page_size, kv.head_dim, kv.dtype), "INT8": is_int8}
    return PageArgs(kv.k, kv.v, k_scales, v_scales, constants)


def slots_of(kv: KV, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return views of all slots of x, which is kv.k or kv.v: the numbers [P, S, D] and, in int8, the scales [P, S]."""
    S, D = kv.page_size, kv.head_dim
    if kv.dtype != torch.int8:
        return x, None
    return x[:, : S * D].view(-1, S, D), x.view(torch.bfloat16)[:, S * D // SCALE_BYTES :]


def read_slots(kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of slots in float32, [..., D] for slots [...]."""
    page, place = slots // kv.page_size, slots % kv.page_size
    read = []
    for x in (kv.k, kv.v):
        numbers, scales = slots_of(kv, x)
        y = numbers[page, place]
        read.append(y.float() if scales is None else dequantize(y, scales[page, place]))
    k, v = read
    return rotate(k) if kv.dtype == torch.int8 else k, v
