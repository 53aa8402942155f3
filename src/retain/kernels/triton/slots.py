"""Slot kernels: write fresh tokens, copy pages."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.slots import pool_dtypes, quantized_slots
from retain.kernels.triton.elementwise import apply_rope

LARGEST_VALUE, LARGEST_FLOAT16 = tl.constexpr(pool_dtypes.LARGEST_VALUE), tl.constexpr(pool_dtypes.LARGEST_FLOAT16)
LARGEST_INTEGER = tl.constexpr(float(quantized_slots.LARGEST))
LARGEST_FP8 = tl.constexpr(float(quantized_slots.LARGEST_FP8))
SMALLEST_SCALE = tl.constexpr(quantized_slots.SMALLEST_SCALE)
ROUNDER = tl.constexpr(1.5 * 2**23)  # float32 has no fractions at this size


@triton.jit
def bound_values(v):
    """Return V of a float dtype as slots hold it: NaN as 0, and no number larger than the largest."""
    LARGEST: tl.constexpr = LARGEST_FLOAT16 if v.dtype == tl.float16 else LARGEST_VALUE
    x = v.to(tl.float32)
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST).to(v.dtype)


@triton.jit
def to_fp8(x):
    """Return the bytes of e4m3 of float32 between -448 and 448, ties to even, by bit patterns: on any GPU."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (tl.abs(x) * 512.0 + ROUNDER - ROUNDER).to(tl.int32)  # below 2^-6: multiples of 2^-9
    return (tl.where(magnitude < 121 << 23, subnormal, normal) | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def round_to_bfloat16(x):
    """Return finite float32 rounded to the nearest bfloat16, ties to even. The interpreter itself truncates."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 32767 + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def store_8bit(x, to, scales, mask, valid):
    """Store rows x [T, D] as int8 or fp8 slots; quantized_slots.py defines the numbers and scales."""
    IS_INTEGER: tl.constexpr = to.dtype.element_ty == tl.int8
    LARGEST: tl.constexpr = LARGEST_INTEGER if IS_INTEGER else LARGEST_FP8
    scale = round_to_bfloat16(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST))
    is_normal = scale > SMALLEST_SCALE
    factor = tl.where(is_normal, tl.div_rn(1.0, tl.where(is_normal, scale, 1.0)), 0.0)
    y = tl.minimum(tl.maximum(x * factor[:, None], -LARGEST), LARGEST)
    y = (y + ROUNDER - ROUNDER).to(tl.int8) if IS_INTEGER else to_fp8(y)  # to the nearest, ties to even
    tl.store(to, y, mask=mask)
    tl.store(scales, scale.to(tl.bfloat16), mask=valid)


@triton.jit(do_not_specialize=["tokens", "slots", "slot_head", "slot_token"])
def write(
    slots, slot_head, slot_token, k, k_token, k_head, v, v_token, v_head, pos, tokens,
    to_k, to_v, k_scales, v_scales, to_pos, mass, freqs, n, attention_factor, q, q_token, q_head, rotated_q,
    G: tl.constexpr, H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, FIRST_SLOT: tl.constexpr,
):  # fmt: skip
    """Write T of the fresh tokens k [T, G, D] and v [T, G, V] into one head's slots; rotate the keys if ROPE.

    Slots before FIRST_SLOT stay as they are. K and V of 4 bits are written before. Programs behind those of the G heads
    rotate one of H heads of q [T, H, D] into `rotated_q`.
    """
    t, g = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    valid, t = t < tokens, t.to(tl.int64)
    if H > 0:  # noqa: SIM102 (the compiler evaluates the outer condition, the device the inner one)
        if g >= G:
            h, d = g - G, tl.arange(0, DP)[None, :]
            p = tl.load(pos + t, mask=valid, other=-1)[:, None]
            from_q, to_q = q + t[:, None] * q_token + h * q_head, rotated_q + (t[:, None] * H + h) * D
            mask = valid[:, None] & (d < D)
            apply_rope(from_q, to_q, d, mask, p, freqs, n, attention_factor, INTERLEAVED, ROPE)
            return
    slot = tl.load(slots + g * slot_head + t * slot_token, mask=valid, other=0).to(tl.int64)
    valid &= slot >= FIRST_SLOT
    p = tl.load(pos + t, mask=valid, other=-1)
    d = tl.arange(0, DP)[None, :]
    mask = valid[:, None] & (d < D)
    e = tl.arange(0, VP)[None, :]
    value_mask = valid[:, None] & (e < V)
    from_k, from_v = k + t[:, None] * k_token + g * k_head, v + t[:, None] * v_token + g * v_head
    page, place = slot // S, slot % S
    at_k, at_v = (page * K_PAGE + place * D)[:, None], (page * V_PAGE + place * V)[:, None]
    if QUANTIZED:
        if K_GROUP == 0:
            at_scale = page * (K_PAGE // 2) + S * D // 2 + place
            store_8bit(tl.load(from_k + d, mask=mask, other=0.0), to_k + at_k + d, k_scales + at_scale, mask, valid)
        if V_GROUP == 0:
            at_scale = page * (V_PAGE // 2) + S * V // 2 + place
            values = tl.load(from_v + e, mask=value_mask, other=0.0)
            store_8bit(values, to_v + at_v + e, v_scales + at_scale, value_mask, valid)
    else:
        value = tl.load(from_v + e, mask=value_mask, other=0.0).to(to_v.dtype.element_ty)
        tl.store(to_v + at_v + e, bound_values(value), mask=value_mask)
        apply_rope(from_k, to_k + at_k, d, mask, p[:, None], freqs, n, attention_factor, INTERLEAVED, ROPE)
    c = tl.arange(0, CP)[None, :]
    zeros = tl.zeros((T, CP), tl.float32)
    tl.store(mass + (slot[:, None] // S * C + c) * S + slot[:, None] % S, zeros, mask=valid[:, None] & (c < C))
    tl.store(to_pos + slot, p, mask=valid)


@triton.jit
def copy(x, src, dst, page, size, BLOCK: tl.constexpr):
    """Copy a block of one page of x [P, size]; pages are `page` numbers apart."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(src + tl.program_id(0)), tl.load(dst + tl.program_id(0))
    tl.store(x + b * page + i, tl.load(x + a * page + i, mask=i < size), mask=i < size)
