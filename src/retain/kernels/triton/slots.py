"""The kernels that fill slots, copy pages and find the slots that go first."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.elementwise import apply_rope


@triton.jit
def write(
    slots, slot_head, slot_token, k, k_token, k_head, v, v_token, v_head, pos, tokens, to_k, to_v, to_pos, mass,
    freqs, n, attention_factor,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """T of the fresh tokens k, v [T, G, D] into a head's slots, keys turned on the way (TURN); position -1: a hole."""
    t, g = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    mine, t = t < tokens, t.to(tl.int64)
    slot = tl.load(slots + g * slot_head + t * slot_token, mask=mine, other=0).to(tl.int64)
    p = tl.load(pos + t, mask=mine, other=-1)
    d = tl.arange(0, DP)[None, :]
    here = mine[:, None] & (d < D)
    from_k, to_k = k + t[:, None] * k_token + g * k_head, to_k + slot[:, None] * D
    value = tl.load(v + t[:, None] * v_token + g * v_head + d, mask=here)
    tl.store(to_v + slot[:, None] * D + d, value.to(to_v.dtype.element_ty), mask=here)
    apply_rope(from_k, to_k, d, here, p[:, None], freqs, n, attention_factor, INTERLEAVED, ROPE)
    c = tl.arange(0, CP)[None, :]
    none = tl.zeros((T, CP), tl.float32)
    tl.store(mass + (slot[:, None] // S * C + c) * S + slot[:, None] % S, none, mask=mine[:, None] & (c < C))
    tl.store(to_pos + slot, p, mask=mine)


@triton.jit
def copy(x, src, dst, size, BLOCK: tl.constexpr):
    """Rows x [P, size] of whole pages."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(src + tl.program_id(0)), tl.load(dst + tl.program_id(0))
    tl.store(x + b * size + i, tl.load(x + a * size + i, mask=i < size), mask=i < size)


@triton.jit
def select_victims(priority, pos, lengths, places, width, sinks, last_evictable, n, BLOCK: tl.constexpr):
    """The n lowest of a list, one after another. See kernels/order.py, whose numbers these are."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lengths + row)
    last = tl.full((), -(2**63), tl.int64)
    for k in range(n):
        best, where = tl.full((), 2**63 - 1, tl.int64), tl.full((), 0, tl.int64)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            p = tl.load(pos + row * width + i, mask=i < count, other=0)
            bits = (
                tl.load(priority + row * width + i, mask=i < count, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
            )
            number = 2147483648 + tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
            number = tl.where((p < sinks) | (p > last_evictable), 4294967296, number)
            order = tl.where(p < 0, i - width, number * 1073741824 + p)
            order = tl.where((i < count) & (order > last), order, 2**63 - 1)
            least = tl.min(order, 0)
            found = tl.min(tl.where(order == least, i, 2147483647), 0)
            where = tl.where(least < best, found.to(tl.int64), where)
            best = tl.minimum(least, best)
        tl.store(places + row * n + k, where)
        last = best
