"""Kernels of packed weights (packed_weight.py draws them): products with few rows, and the numbers of chosen rows.

A byte is loaded once. Its numbers become exact bfloat16 or float16 by bit patterns (see quantized_loads.py), tensor
cores multiply them with the rows, and the scale of each group of 32 multiplies float32 sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.quantized_loads import from_int8

GROUP = tl.constexpr(32)  # inputs that share a scale
TILE_ROWS = tl.constexpr(128)  # outputs of a tile


def _nibbles_asm(base: int, one: int, offset: int, dtype: str) -> str:
    """Return code for four bytes in a register: their four low and four high nibbles, less 8."""
    lines = [".reg .b32 y, a, one, offset;", f"mov.b32 one, {one:#x};", f"mov.b32 offset, {offset:#x};"]
    lines.append("shr.u32 y, $4, 4;")
    for result, (source, order) in enumerate((("$4", "0x4140"), ("$4", "0x4342"), ("y", "0x4140"), ("y", "0x4342"))):
        lines += [
            f"prmt.b32 a, {source}, {base * 0x01010101:#x}, {order};",
            f"and.b32 a, a, {base << 24 | 0xF << 16 | base << 8 | 0xF:#x};",
            f"fma.rn.{dtype} ${result}, a, one, offset;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_NIBBLES_TO_BFLOAT16 = tl.constexpr(_nibbles_asm(0x43, 0x3F803F80, 0xC308C308, "bf16x2"))  # 128 + n, less 136
_NIBBLES_TO_FLOAT16 = tl.constexpr(_nibbles_asm(0x64, 0x3C003C00, 0xE408E408, "f16x2"))  # 1024 + n, less 1032
# Four int8 in a register: 128 + the low seven bits, less 128, or less 256 where the sign bit is set.
_INT8_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, low, high, less;
mov.b32 less, 0xbf80bf80;
prmt.b32 a, $2, 0x43434343, 0x4140;
prmt.b32 b, $2, 0x43434343, 0x4342;
and.b32 low, a, 0x437f437f;
and.b32 high, a, 0x43804380;
fma.rn.bf16x2 $0, high, less, low;
and.b32 low, b, 0x437f437f;
and.b32 high, b, 0x43804380;
fma.rn.bf16x2 $1, high, less, low;
}""")


@triton.jit
def unpack_int4(packed, DOT: tl.constexpr):
    """Return the numbers in the low and in the high nibbles of bytes uint8, less 8."""
    if DOT == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES_TO_BFLOAT16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif DOT == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES_TO_FLOAT16, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        x = packed.to(tl.int32)
        low, high = ((x & 15) - 8).to(DOT), ((x >> 4) - 8).to(DOT)
    return low, high


@triton.jit
def unpack_int8(packed, DOT: tl.constexpr):
    """Return bytes uint8 as signed numbers."""
    if DOT == tl.bfloat16:
        x = tl.inline_asm_elementwise(_INT8_TO_BFLOAT16, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        x = from_int8(packed.to(tl.int8, bitcast=True), DOT, True)
    return x


@triton.jit
def split_scales(words):
    """Return the low and the high halves of 32-bit words, float16, as float32."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def multiply_packed(
    x, x_row, numbers, scales, partial, tokens, n, width, steps, split_steps,
    BITS: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Set partial[split, t, :n] to the products of x[t] and the rows of a tile over one split of the inputs."""
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BYTES: tl.constexpr = TILE_ROWS * GROUP * BITS // 4  # of a step of two groups
    row, i = tl.arange(0, TILE_ROWS), tl.arange(0, GROUP)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    at_x = x + t.to(tl.int64)[None, :] * x_row + i[:, None]
    is_token = (t < tokens)[None, :]
    at_numbers = numbers + tile * steps * BYTES + row[:, None] * GROUP + i[None, :]
    at_scales = scales + tile * steps * (TILE_ROWS * 8 // BITS) + row
    total = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    zeros = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    ones = tl.full((TILE_ROWS, GROUP), 1.0, DOT)
    begin = split * split_steps
    for step in tl.range(begin, tl.minimum(begin + split_steps, steps), num_stages=STAGES):
        x_low = tl.load(at_x + step * (2 * GROUP), mask=is_token, other=0.0)
        is_input = is_token & (step * (2 * GROUP) + GROUP < width)
        x_high = tl.load(at_x + step * (2 * GROUP) + GROUP, mask=is_input, other=0.0)
        packed = tl.load(at_numbers + step * BYTES)
        if BITS == 4:
            words = tl.load(at_scales + step * (2 * TILE_ROWS))
            words_high = tl.load(at_scales + step * (2 * TILE_ROWS) + TILE_ROWS)
            low, high = unpack_int4(packed, DOT)
            scale, shift = split_scales(words)
            scale_high, shift_high = split_scales(words_high)
        else:
            packed_high = tl.load(at_numbers + step * BYTES + BYTES // 2)
            low, high = unpack_int8(packed, DOT), unpack_int8(packed_high, DOT)
            scale, scale_high = split_scales(tl.load(at_scales + step * TILE_ROWS))
        x_low, x_high = x_low.to(DOT), x_high.to(DOT)
        total += tl.dot(low, x_low, zeros, input_precision=PRECISION) * scale[:, None]
        total += tl.dot(high, x_high, zeros, input_precision=PRECISION) * scale_high[:, None]
        if BITS == 4:  # all numbers are 8 too low; sums of the rows come from tensor cores, too, where they are needed
            total += tl.dot(ones, x_low, zeros, input_precision=PRECISION) * (shift + 8 * scale)[:, None]
            total += tl.dot(ones, x_high, zeros, input_precision=PRECISION) * (shift_high + 8 * scale_high)[:, None]
    out = tile * TILE_ROWS + row
    to = partial + (split * tokens + t)[None, :].to(tl.int64) * n + out[:, None]
    tl.store(to, total, mask=is_token & (out < n)[:, None])


@triton.jit
def add_splits(
    partial, bias, y, y_row, out, out_row, tokens, n, splits,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Set out[t] to the sum of a row's splits, with a bias and with y[t] where there are any."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    at = (split[:, None] * tokens + t) * n + i[None, :]
    parts = tl.load(partial + at, mask=(split < splits)[:, None] & (i < n)[None, :], other=0.0)
    total = tl.sum(parts, 0)
    if BIAS:
        total += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(y + t * y_row + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + t * out_row + i, total.to(out.dtype.element_ty), mask=i < n)


@triton.jit
def unpack_rows(
    index, numbers, scales, out, rows, width, steps,
    BITS: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Set out[r] to row index[r] of the dense matrix, or to row r of it; out [rows, width]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    i = tl.arange(0, GROUP)
    exists = (r < rows)[:, None]
    row = (tl.load(index + r, mask=r < rows, other=0) if INDEXED else r).to(tl.int64)
    BYTES: tl.constexpr = TILE_ROWS * GROUP * BITS // 4
    place = row // TILE_ROWS * steps + step
    at = (place * BYTES + row % TILE_ROWS * GROUP)[:, None] + i[None, :]
    at_scale = place * (TILE_ROWS * 8 // BITS) + row % TILE_ROWS
    packed = tl.load(numbers + at, mask=exists, other=0)
    low_scale, low_shift = split_scales(tl.load(scales + at_scale, mask=r < rows, other=0))
    if BITS == 4:
        high_scale, high_shift = split_scales(tl.load(scales + at_scale + TILE_ROWS, mask=r < rows, other=0))
        x = packed.to(tl.int32)
        low = (x & 15).to(tl.float32) * low_scale[:, None] + low_shift[:, None]
        high = (x >> 4).to(tl.float32) * high_scale[:, None] + high_shift[:, None]
    else:
        packed_high = tl.load(numbers + at + BYTES // 2, mask=exists, other=0)
        low = packed.to(tl.int8, bitcast=True).to(tl.float32) * low_scale[:, None]
        high = packed_high.to(tl.int8, bitcast=True).to(tl.float32) * low_shift[:, None]  # the scale of the second
    to = out + r.to(tl.int64)[:, None] * width + step * (2 * GROUP) + i[None, :]
    tl.store(to, low.to(out.dtype.element_ty), mask=exists)
    is_input = step * (2 * GROUP) + GROUP < width
    tl.store(to + GROUP, high.to(out.dtype.element_ty), mask=exists & is_input)
