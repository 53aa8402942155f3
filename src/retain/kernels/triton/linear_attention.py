"""Short convolutions and linear attention as kernel launches of fixed shapes, so that a CUDA graph can hold them.

Which request a token belongs to comes from the device: `requests` are decode tiles, int32 [B, 6] (see plan.py), one for
each request, however many tokens it has.
"""

from __future__ import annotations

import triton
from torch import Tensor

from retain.kernels.api import GroupInputs
from retain.kernels.shape_checks import shape_error
from retain.kernels.triton import fresh_tokens, linear_attention_kernels
from retain.kernels.triton.fresh_tokens import tokens_per_program
from retain.kernels.triton.page_layout import page_args

MAX_BLOCK_CHANNELS = 128  # of a program of a convolution


def convolve(
    x: Tensor, inputs: GroupInputs, requests: Tensor, positions: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return causal convolutions [T, C] of rows x [T, C] with weight float32 [C, W], and write the rows into slots."""
    T, C = x.shape
    kv = inputs.kv
    G = inputs.tables.pages.shape[1]
    if G * (kv.k_dim + kv.v_dim) != C:
        raise shape_error("convolve", f"x [T, {G * (kv.k_dim + kv.v_dim)}]", x=x)
    out = x.new_empty(T, C)
    if not T:
        return out
    pages = page_args(kv)
    tables = inputs.tables
    block_t = tokens_per_program(T, 8)
    block_n = min(triton.next_power_of_2(C // G), MAX_BLOCK_CHANNELS)
    # A fused multiply-add rounds once where the definition rounds twice.
    linear_attention_kernels.convolve[(triton.cdiv(T, block_t), G, triton.cdiv(C // G, block_n))](
        x, x.stride(0), out, weight, weight if bias is None else bias, pages.k, pages.v, kv.pos,
        tables.pages, *tables.pages.stride()[:2], tables.counts, *tables.counts.stride(),
        requests, len(requests), positions, T,
        W=weight.shape[1], K=kv.k_dim, V=kv.v_dim, G=G, S=kv.page_size, SP=triton.next_power_of_2(kv.page_size),
        K_PAGE=pages.constants["K_PAGE"], V_PAGE=pages.constants["V_PAGE"],
        T=block_t, R=triton.next_power_of_2(len(requests)), N=block_n, BIAS=bias is not None,
        enable_fp_fusion=False,
    )  # fmt: skip
    k, v = x.view(T, G, -1).split([kv.k_dim, kv.v_dim], dim=-1)
    fresh_tokens.write(kv, inputs.slot_mapping, k, v, positions, first_slot=kv.page_size)
    return out
