"""The kernels between products: norms, activations and rotations of rows, in float32 inside."""

from __future__ import annotations

import triton
import triton.language as tl

SILU, RELU, GELU, GELU_TANH = (tl.constexpr(i) for i in range(4))
ACTIVATIONS = {"silu": SILU.value, "relu": RELU.value, "gelu": GELU.value, "gelu_tanh": GELU_TANH.value}


@triton.jit
def norm(
    x, x_row, out, out_row, weight, bias, tokens, n, eps,
    T: tl.constexpr, BLOCK: tl.constexpr, SUBTRACT_MEAN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One head of T rows: n numbers, by its own weights; to what `out` holds, or added to it (ADD)."""
    t, h = (tl.program_id(0) * T + tl.arange(0, T))[:, None], tl.program_id(1)
    i = tl.arange(0, BLOCK)[None, :]
    there = (t < tokens) & (i < n)
    y = tl.load(x + t.to(tl.int64) * x_row + h * n + i, mask=there, other=0.0).to(tl.float32)
    if SUBTRACT_MEAN:
        y = tl.where(there, y - tl.sum(y, 1)[:, None] / n, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 1) / n + eps)[:, None]
    y *= tl.load(weight + h * n + i, mask=i < n)
    if BIAS:
        y += tl.load(bias + h * n + i, mask=i < n)
    to = out + t.to(tl.int64) * out_row + h * n + i
    if ADD:
        y += tl.load(to, mask=there).to(tl.float32)
    tl.store(to, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def activation(
    x, x_row, out, tokens, n, T: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """out [tokens, n] = act(x[:n]), GATED times x[n : 2 n]."""
    t = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    i = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there, t = (t < tokens) & (i < n), t.to(tl.int64)
    y = tl.load(x + t * x_row + i, mask=there, other=0.0).to(tl.float32)
    if ACT == SILU:
        y = y / (1.0 + tl.exp(-y))
    if ACT == RELU:
        y = tl.maximum(y, 0.0)
    if ACT == GELU:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACT == GELU_TANH:
        u = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y - y / (1.0 + tl.exp(2.0 * u))  # = y (1 + tanh u) / 2
    if GATED:
        y *= tl.load(x + t * x_row + n + i, mask=there, other=0.0).to(tl.float32)
    tl.store(out + t * n + i, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def apply_rope(x, out, d, mask, pos, freqs, n, attention_factor, INTERLEAVED: tl.constexpr, ROPE: tl.constexpr):
    """Heads x as they are, or with the first 2 n of their numbers d rotated by position (TURN), in float32 in between;
    see models/rope.py. `here`: which tokens and numbers there are.
    """
    if ROPE:
        a, b = (2 * d, 2 * d + 1) if INTERLEAVED else (d, d + n)
        angle = pos.to(tl.float32) * tl.load(freqs + d, mask=d < n, other=0.0)
        cos, sin = tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor
        there = mask & (d < n)
        u = tl.load(x + a, mask=there, other=0.0).to(tl.float32)
        w = tl.load(x + b, mask=there, other=0.0).to(tl.float32)
        tl.store(out + a, (u * cos - w * sin).to(out.dtype.element_ty), mask=there)
        tl.store(out + b, (w * cos + u * sin).to(out.dtype.element_ty), mask=there)
        mask &= d >= 2 * n
    tl.store(out + d, tl.load(x + d, mask=mask).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope(
    x, x_token, x_head, out, pos, tokens, freqs, n, attention_factor,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """T tokens of one head of x [tokens, H, D], turned, into `out`."""
    t, h, d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, DP)[None, :]
    p = tl.load(pos + t, mask=t < tokens, other=0)[:, None]
    here = (t < tokens)[:, None] & (d < D)
    t = t.to(tl.int64)[:, None]
    apply_rope(
        x + t * x_token + h * x_head, out + (t * H + h) * D, d, here, p, freqs, n, attention_factor, INTERLEAVED, True
    )
