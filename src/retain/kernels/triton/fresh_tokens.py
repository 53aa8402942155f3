"""Fresh tokens as kernel launches: the rotation of queries and keys, and the write of K and V into their slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from retain.kernels import int8_slots
from retain.kernels.api import KV
from retain.kernels.triton import elementwise, slots
from retain.kernels.triton.page_layout import page_args


@dataclass(frozen=True)
class RopeParams:
    """The rotation of keys before they are written; see models/rope.py. freqs float32 [n]."""

    freqs: Tensor
    attention_factor: float
    interleaved: bool


def tokens_per_program(tokens: int, limit: int) -> int:
    """Return the tokens of one program of an elementwise kernel. The interpreter is faster with few programs."""
    return min(triton.next_power_of_2(tokens), 512 if triton.knobs.runtime.interpret else limit)


def rotate(x: Tensor, positions: Tensor, rope: RopeParams, dtype: torch.dtype | None = None) -> Tensor:
    """Return queries or keys [T, H, D] rotated by their positions, in their own dtype or in another."""
    T, H, D = x.shape
    block_t = tokens_per_program(T, 8)
    out = torch.empty(T, H, D, dtype=dtype or x.dtype, device=x.device)
    elementwise.rope[(triton.cdiv(T, block_t), H)](
        x, *x.stride()[:2], out, positions, T, rope.freqs, len(rope.freqs), rope.attention_factor,
        H=H, D=D, DP=triton.next_power_of_2(D), T=block_t, INTERLEAVED=rope.interleaved,
        num_warps=4 if block_t > 1 else 1,
    )  # fmt: skip
    return out


def write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor, rope: RopeParams | None = None) -> None:
    """Store fresh tokens in their slots; with `rope`, rotate the keys on the way."""
    T, G, D = k.shape
    is_int8 = kv.dtype == torch.int8
    if is_int8:  # the largest number of a row is needed before the row is stored
        k = rotate(k, pos.contiguous(), rope, torch.float32) if rope and T else k
        k, v = int8_slots.rotate(k), v.float()
        rope = None
    else:
        k, v = k if rope else k.to(kv.dtype), v.to(kv.dtype)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    C = kv.mass.shape[1]
    freqs = rope.freqs if rope else kv.mass  # without rope the kernel does not read it
    block_t = tokens_per_program(T, 8)
    pages = page_args(kv)
    slots.write[(triton.cdiv(T, block_t), G)](
        slot_mapping, *slot_mapping.stride(), k, *k.stride()[:2], v, *v.stride()[:2], pos.contiguous(), T,
        pages.k, pages.v, pages.k_scales, pages.v_scales, kv.pos, kv.mass,
        freqs, len(rope.freqs) if rope else 0, rope.attention_factor if rope else 1.0,
        S=kv.page_size, D=D, DP=triton.next_power_of_2(D), C=C, CP=triton.next_power_of_2(C), T=block_t,
        ROPE=rope is not None, INTERLEAVED=rope is not None and rope.interleaved, **pages.constants,
        num_warps=4 if block_t > 1 else 1,
    )  # fmt: skip
