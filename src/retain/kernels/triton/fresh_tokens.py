"""Fresh tokens as kernel launches: the rotation of queries and keys, and the write of K and V into their slots."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from retain.kernels.api import KV
from retain.kernels.rope import Rope
from retain.kernels.slots import quantized_slots
from retain.kernels.slots.pool_dtypes import QUANTIZED_DTYPES, bound_values
from retain.kernels.triton import elementwise, sketches, slots
from retain.kernels.triton.elementwise import tokens_per_program
from retain.kernels.triton.kernel_args import array_args, query_args, slot_args
from retain.kernels.triton.page_layout import page_args, write_4bit


def rotate(x: Tensor, positions: Tensor, rope: Rope, dtype: torch.dtype | None = None) -> Tensor:
    """Return queries or keys [T, H, D] rotated by their positions, in their own dtype or in another."""
    T, H, D = x.shape
    block_t = tokens_per_program(T, 8)
    out = torch.empty(T, H, D, dtype=dtype or x.dtype, device=x.device)
    # The same bits as where `write` rotates: a multiply-add is not fused.
    elementwise.rope[(triton.cdiv(T, block_t), H)](
        **array_args(x, "x", "x_token", "x_head"), out=out, pos=positions, tokens=T, freqs=rope.freqs,
        n=len(rope.freqs), attention_factor=rope.attention_factor,
        H=H, D=D, DP=triton.next_power_of_2(D), T=block_t, INTERLEAVED=rope.interleaved,
        num_warps=4 if block_t > 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def write(
    kv: KV,
    slot_mapping: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    rope: Rope | None = None,
    offset: Tensor | None = None,
    first_slot: int = 0,
) -> None:
    """Store fresh tokens in their slots; with `rope`, rotate the keys on the way, then subtract `offset` [G, D].

    Tokens of slots before `first_slot` are not written (but for numbers of 4 bits).
    """
    T = len(k)
    if offset is not None:
        k = (rotate(k, pos.contiguous(), rope, torch.float32) if rope and T else k.float()) - offset
        rope = None
    if kv.dtype in QUANTIZED_DTYPES:  # the largest number of a row is needed before the row is stored
        k = rotate(k, pos.contiguous(), rope, torch.float32) if rope and T else k
        k, v = quantized_slots.rotate(k), bound_values(v, kv.dtype)
        for x, to in ((k, kv.k), (v, kv.v)):
            if to.dtype == torch.uint8:
                write_4bit(kv, slot_mapping, x, to)
        rope = None
    else:
        k, v = k if rope else k.to(kv.dtype), v.to(kv.dtype)
    _launch_write(kv, slot_mapping, k, v, pos, rope, first_slot=first_slot)


def rotate_and_write(
    kv: KV,
    slot_mapping: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    pos: Tensor,
    rope: Rope,
    offset: Tensor | None = None,
) -> Tensor:
    """Return rotated queries [T, H, D], and store K and V as `write` does: in one launch, where slots are plain."""
    q, k, v = qkv
    if offset is not None or kv.dtype in QUANTIZED_DTYPES:
        write(kv, slot_mapping, k, v, pos, rope, offset)
        return rotate(q, pos, rope)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch_write(kv, slot_mapping, k, v.to(kv.dtype), pos, rope, q, rotated)
    return rotated


def _launch_write(
    kv: KV,
    slot_mapping: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    rope: Rope | None,
    q: Tensor | None = None,
    rotated: Tensor | None = None,
    first_slot: int = 0,
) -> None:
    """Store rows in slots, and rotate q into `rotated` if there are queries."""
    T, G, D = k.shape
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    C = kv.mass.shape[1]
    freqs = rope.freqs if rope else kv.mass  # without rope the kernel does not read it
    H = 0 if q is None else q.shape[1]
    queries = k if q is None else q  # the kernel does not read them where H is 0
    block_t = tokens_per_program(T, 8)
    pages = page_args(kv)
    # A fused multiply-add rounds once where the definition of quantized slots rounds twice.
    slots.write[(triton.cdiv(T, block_t), G + H)](
        **slot_args(slot_mapping), **array_args(k, "k", "k_token", "k_head"), **array_args(v, "v", "v_token", "v_head"),
        pos=pos.contiguous(), tokens=T, to_k=pages.k, to_v=pages.v, **pages.scales, to_pos=kv.pos, mass=kv.mass,
        freqs=freqs, n=len(rope.freqs) if rope else 0, attention_factor=rope.attention_factor if rope else 1.0,
        **query_args(queries), rotated_q=queries if rotated is None else rotated,
        G=G, H=H, S=kv.page_size, D=D, DP=triton.next_power_of_2(D), V=kv.v_dim, VP=triton.next_power_of_2(kv.v_dim),
        C=C, CP=triton.next_power_of_2(C), T=block_t, ROPE=rope is not None,
        INTERLEAVED=rope is not None and rope.interleaved, **pages.constants, FIRST_SLOT=first_slot,
        num_warps=4 if block_t > 1 else 1, enable_fp_fusion=False,
    )  # fmt: skip
    if kv.sketches is not None:
        sketches.write(kv, slot_mapping)
