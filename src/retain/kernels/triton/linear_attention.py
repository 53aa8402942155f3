"""Short convolutions and linear attention as kernel launches of fixed shapes, so that a CUDA graph can hold them.

Which request a token belongs to comes from the device: `requests` are decode tiles, int32 [B, 6] (see plan.py), one for
each request, however many tokens it has.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from retain.kernels.api import GroupInputs
from retain.kernels.linear_attention import LinearAttention, Mamba2Rule
from retain.kernels.shape_checks import shape_error
from retain.kernels.triton import fresh_tokens, linear_attention_kernels
from retain.kernels.triton.elementwise import tokens_per_program
from retain.kernels.triton.kernel_args import KernelArgs, slot_args, table_args
from retain.kernels.triton.page_layout import page_args

MAX_BLOCK_CHANNELS = 128  # of a program of a convolution
BLOCK_V = 32  # columns of a state that a program computes
CHUNK = 32  # numbers of a key that a warp multiplies


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
    block_t = tokens_per_program(T, 8)
    block_n = min(triton.next_power_of_2(C // G), MAX_BLOCK_CHANNELS)
    # A fused multiply-add rounds once where the definition rounds twice.
    linear_attention_kernels.convolve[(triton.cdiv(T, block_t), G, triton.cdiv(C // G, block_n))](
        x=x, x_row=x.stride(0), out=out, weight=weight, bias=weight if bias is None else bias, k=pages.k, v=pages.v,
        pos=kv.pos, **table_args(inputs.tables), requests=requests, num_requests=len(requests), positions=positions,
        tokens=T, W=weight.shape[1], K=kv.k_dim, V=kv.v_dim, G=G, S=kv.page_size,
        SP=triton.next_power_of_2(kv.page_size),
        K_PAGE=pages.constants["K_PAGE"], V_PAGE=pages.constants["V_PAGE"], T=block_t,
        R=triton.next_power_of_2(len(requests)), N=block_n, BIAS=bias is not None, enable_fp_fusion=False,
    )  # fmt: skip
    k, v = x.view(T, G, -1).split([kv.k_dim, kv.v_dim], dim=-1)
    fresh_tokens.write(kv, inputs.slot_mapping, k, v, positions, first_slot=kv.page_size)
    return out


def attend_linearly(
    qkv: Tensor,
    gates: Tensor,
    tokens: GroupInputs,
    states: GroupInputs,
    requests: Tensor,
    positions: Tensor,
    p: LinearAttention,
) -> Tensor:
    """Return outputs [T, value heads * v_dim] for rows [q | k | v] and rows of gates; write slots and states."""
    T = len(qkv)
    H = p.num_value_heads
    D = p.k_dim
    V = p.v_dim
    S = tokens.kv.page_size
    F = states.kv.page_size
    num_parts = triton.cdiv(D, 2 * F)
    _check_caches(tokens, states, p, num_parts)
    out = qkv.new_zeros(T, H * V)  # padding tokens are of no request
    if not T:
        return out
    decays = torch.zeros(T, H, dtype=torch.float32, device=qkv.device)
    own = page_args(tokens.kv)
    at_ends = page_args(states.kv)
    own_slots = slot_args(tokens.slot_mapping)
    end_slots = _state_args(slot_args(states.slot_mapping))
    k_page = own.constants["K_PAGE"]
    sizes = {"H": H, "R": H // p.num_key_heads, "D": D, "S": S, "K_PAGE": k_page, "F": F, "PARTS": num_parts}
    chunk = min(_pad(D), CHUNK)
    num_chunks = _pad(D) // chunk
    block_v = min(_pad(V), BLOCK_V if D <= 128 else BLOCK_V // 2)
    # Whether a multiply-add is fused would be the compiler's choice.
    linear_attention_kernels.attend_linearly[(len(requests), H, triton.cdiv(V, block_v))](
        qkv=qkv, qkv_row=qkv.stride(0), gates=gates, gates_row=gates.stride(0), decay=p.decay, time_bias=p.time_bias,
        **_rule_args(p), out=out, decays=decays, k=own.k, u=own.v, pos=tokens.kv.pos, **table_args(tokens.tables),
        **own_slots, state_k=at_ends.k, state_v=at_ends.v, state_pos=states.kv.pos,
        **_state_args(table_args(states.tables)), **end_slots, requests=requests, positions=positions, **sizes,
        C=num_chunks, N=chunk, V=V, VB=block_v, SP=triton.next_power_of_2(S), V_PAGE=own.constants["V_PAGE"],
        STATE_K_PAGE=at_ends.constants["K_PAGE"], STATE_V_PAGE=at_ends.constants["V_PAGE"],
        num_warps=max(4, min(2 * num_chunks, 8)), enable_fp_fusion=False,
    )  # fmt: skip
    block_t = tokens_per_program(T, 8)
    C = tokens.kv.mass.shape[1]
    linear_attention_kernels.write_keys[(triton.cdiv(T, block_t), H)](
        qkv=qkv, qkv_row=qkv.stride(0), decays=decays, k=own.k, pos=tokens.kv.pos, mass=tokens.kv.mass, **own_slots,
        state_pos=states.kv.pos, **end_slots, positions=positions, tokens=T, **sizes,
        C=C, CP=triton.next_power_of_2(C), T=block_t, N=triton.next_power_of_2(D + 8),
    )  # fmt: skip
    return out


def _rule_args(p: LinearAttention) -> KernelArgs:
    """Return the rule's arguments of a kernel; the delta rule reads none of Mamba-2."""
    if not isinstance(p.rule, Mamba2Rule):
        return {"RULE": "delta", "skip": p.decay, "min_step": 0.0, "max_step": 0.0}
    min_step, max_step = p.rule.time_step_limits
    return {"RULE": "mamba2", "skip": p.rule.skip, "min_step": min_step, "max_step": max_step}


def _state_args(args: KernelArgs) -> KernelArgs:
    """Return arguments under the names that a kernel has for those of states."""
    return {f"state_{name}": value for name, value in args.items()}


def _pad(n: int) -> int:
    """Return the next size of a matrix that kernels multiply."""
    return max(16, int(triton.next_power_of_2(n)))


def _check_caches(tokens: GroupInputs, states: GroupInputs, p: LinearAttention, num_parts: int) -> None:
    """Raise ValueError unless the caches of a layer have the sizes of its slots and states."""
    H = p.num_value_heads
    V = p.v_dim
    found = [(x.tables.pages.shape[1], x.kv.k_dim, x.kv.v_dim) for x in (tokens, states)]
    expected = [(H, p.k_dim + 8, V), (H * num_parts, V, V)]
    if found != expected:
        raise ValueError(f"linear attention: expected caches of heads, k_dim and v_dim {expected}; got {found}")
