"""Elementwise kernels of a program: norms, activations and rope on rows, computed in float32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retain.kernels.ops import ACTIVATIONS

SILU, RELU, GELU, GELU_TANH, SIGMOID, RELU2, SWIGLU_OAI = (tl.constexpr(i) for i in range(7))


def tokens_per_program(tokens: int, limit: int) -> int:
    """Return the tokens of one program of an elementwise kernel: `limit`, or 1 in a small step.

    Each number is a variant to be compiled. The interpreter is faster with few programs.
    """
    if triton.knobs.runtime.interpret:
        return min(triton.next_power_of_2(tokens), 512)
    return limit if tokens >= limit else 1


@triton.jit(do_not_specialize=["tokens"])
def norm(
    x, x_row, out, out_row, weight, bias, tokens, n, eps,
    T: tl.constexpr, BLOCK: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Normalize one group of n numbers of T rows by its weights; replace `out`, or add to it (ADD)."""
    t, h = (tl.program_id(0) * T + tl.arange(0, T))[:, None], tl.program_id(1)
    i = tl.arange(0, BLOCK)[None, :]
    valid = (t < tokens) & (i < n)
    y = tl.load(x + t.to(tl.int64) * x_row + h * n + i, mask=valid, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        y = tl.where(valid, y - tl.sum(y, 1)[:, None] / n, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / n + eps)[:, None]
    y *= tl.load(weight + h * n + i, mask=i < n)
    if BIAS:
        y += tl.load(bias + h * n + i, mask=i < n)
    to = out + t.to(tl.int64) * out_row + h * n + i
    if ADD:
        y += tl.load(to, mask=valid).to(tl.float32)
    tl.store(to, y.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def activation(
    x, x_row, out, tokens, n, T: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Set out [tokens, n] = act(x[:n]), times x[n : 2 n] if GATED."""
    t = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    valid, t = (t < tokens) & (i < n), t.to(tl.int64)
    y = tl.load(x + t * x_row + i, mask=valid, other=0.0).to(tl.float32)
    if ACT == SILU:
        y = y / (1.0 + tl.exp(-y))
    if ACT == RELU:
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACT == GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACT == GELU_TANH:
        u = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y - y / (1.0 + tl.exp(2.0 * u))  # = y (1 + tanh u) / 2
    if ACT == SIGMOID:
        y = 1.0 / (1.0 + tl.exp(-y))
    if ACT == RELU2:
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = y * y
    if ACT == SWIGLU_OAI:
        y = tl.minimum(y, 7.0, propagate_nan=tl.PropagateNan.ALL)
        y = y / (1.0 + tl.exp(-1.702 * y))
    if GATED:
        gate = tl.load(x + t * x_row + n + i, mask=valid, other=0.0).to(tl.float32)
        if ACT == SWIGLU_OAI:
            bounded = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
            gate = tl.maximum(bounded, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        y *= gate
    tl.store(out + t * n + i, y.to(out.dtype.element_ty), mask=valid)


def activate(rows: Tensor, act: str, n: int, gated: bool) -> Tensor:
    """Return act(x[:n]), times x[n : 2 n] if `gated`, of rows x: [T, n]."""
    T = len(rows)
    out = rows.new_empty(T, n)
    if T:
        block_t = tokens_per_program(T, 1)
        block = min(triton.next_power_of_2(n), 1024)
        activation[(triton.cdiv(T, block_t), triton.cdiv(n, block))](
            x=rows, x_row=rows.stride(0), out=out, tokens=T, n=n,
            T=block_t, BLOCK=block, ACT=ACTIVATIONS.index(act), GATED=gated,
        )  # fmt: skip
    return out


@triton.jit
def apply_rope(x, out, d, mask, pos, freqs, n, attention_factor, INTERLEAVED: tl.constexpr, ROPE: tl.constexpr):
    """Copy heads x to `out` and, if ROPE, rotate the first 2 n numbers by position, in float32. See kernels/rope.py.

    `d` are the indices of the numbers in a head; `mask` selects the tokens and numbers that exist.
    """
    if ROPE:
        a, b = (2 * d, 2 * d + 1) if INTERLEAVED else (d, d + n)
        angle = pos.to(tl.float32) * tl.load(freqs + d, mask=d < n, other=0.0)
        cos, sin = tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor
        rotated = mask & (d < n)
        u = tl.load(x + a, mask=rotated, other=0.0).to(tl.float32)
        w = tl.load(x + b, mask=rotated, other=0.0).to(tl.float32)
        tl.store(out + a, (u * cos - w * sin).to(out.dtype.element_ty), mask=rotated)
        tl.store(out + b, (w * cos + u * sin).to(out.dtype.element_ty), mask=rotated)
        mask &= d >= 2 * n
    tl.store(out + d, tl.load(x + d, mask=mask).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rope(
    x, x_token, x_head, out, pos, tokens, freqs, n, attention_factor,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate one head of T tokens of x [tokens, H, D] into `out`."""
    t, h, d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, DP)[None, :]
    p = tl.load(pos + t, mask=t < tokens, other=0)[:, None]
    mask = (t < tokens)[:, None] & (d < D)
    t = t.to(tl.int64)[:, None]
    from_x, to = x + t * x_token + h * x_head, out + (t * H + h) * D
    apply_rope(from_x, to, d, mask, p, freqs, n, attention_factor, INTERLEAVED, True)
