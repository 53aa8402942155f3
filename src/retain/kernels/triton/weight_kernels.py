"""Kernels of packed weights (packed_weight.py draws them): products with few rows, and the numbers of chosen rows.

A word is loaded once. Its numbers become bfloat16 or float16 by bit patterns (see quantized_loads.py), and tensor cores
multiply them with the rows. Of 8 bits they are exact, and the scale of each group of 32, or of 16, multiplies float32
sums. Of 4 bits they are rounded with their scales and shifts, as in a dense matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF = tl.constexpr(16)  # of a group of inputs that share a scale: what tensor cores multiply at once
TILE_ROWS = tl.constexpr(128)  # outputs of a tile


def _nibbles_asm(base: int, one: int, offset: int, dtype: str) -> str:
    """Return code for two words of 16 bits in a register: the nibbles of both, less 8, times scales, plus shifts.

    The scale and the shift of the two lower nibbles come before those of the two higher ones, each twice in a register.
    """
    lines = [".reg .b32 x, one, offset;", f"mov.b32 one, {one:#x};", f"mov.b32 offset, {offset:#x};"]
    for i in range(4):
        lines += [
            f"shr.u32 x, $4, {4 * i};",
            f"lop3.b32 x, x, 0x000f000f, {base:#x}, 0xea;",  # x & mask | base
            f"fma.rn.{dtype} x, x, one, offset;",
            f"fma.rn.{dtype} ${i}, x, ${5 + i // 2 * 2}, ${6 + i // 2 * 2};",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_NIBBLES_TO_BFLOAT16 = tl.constexpr(_nibbles_asm(0x43004300, 0x3F803F80, 0xC308C308, "bf16x2"))  # 128 + n, less 136
_NIBBLES_TO_FLOAT16 = tl.constexpr(_nibbles_asm(0x64006400, 0x3C003C00, 0xE408E408, "f16x2"))  # 1024 + n, less 1032
# Two words in a register to the low and the high bytes of both. The low seven bits of a byte are added to 128, of which
# 128 is subtracted, or 256 where the sign bit is set.
_INT8_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 x, low, high, minus;
mov.b32 minus, 0xbf80bf80;
lop3.b32 low, $2, 0x007f007f, 0x43004300, 0xea;
lop3.b32 high, $2, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 $0, high, minus, low;
shr.u32 x, $2, 8;
lop3.b32 low, x, 0x007f007f, 0x43004300, 0xea;
lop3.b32 high, x, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 $1, high, minus, low;
}""")
# With the sign bit flipped, an integer is 128 too high: 1024 + 128 + n, less 1152.
_INT8_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 x, y, one, offset;
mov.b32 one, 0x3c003c00;
mov.b32 offset, 0xe480e480;
xor.b32 x, $2, 0x80808080;
lop3.b32 y, x, 0x00ff00ff, 0x64006400, 0xea;
fma.rn.f16x2 $0, y, one, offset;
shr.u32 x, x, 8;
lop3.b32 y, x, 0x00ff00ff, 0x64006400, 0xea;
fma.rn.f16x2 $1, y, one, offset;
}""")


@triton.jit
def unpack_int4(words, scale, shift, next_scale, next_shift, DOT: tl.constexpr):
    """Return the four nibbles of words int16 [rows, 16], lowest first, less 8, times scales [rows], plus shifts.

    Two nibbles are of a group, two of the next one. Scales and shifts are rounded to DOT, and so are the sums.
    """
    s, b = scale.to(DOT)[:, None], shift.to(DOT)[:, None]
    t, c = next_scale.to(DOT)[:, None], next_shift.to(DOT)[:, None]
    if DOT == tl.bfloat16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _NIBBLES_TO_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, s, b, t, c],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif DOT == tl.float16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _NIBBLES_TO_FLOAT16, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, s, b, t, c],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = words.to(tl.int32)
        w0, w1 = ((x & 15) - 8).to(DOT) * s + b, ((x >> 4 & 15) - 8).to(DOT) * s + b
        w2, w3 = ((x >> 8 & 15) - 8).to(DOT) * t + c, ((x >> 12 & 15) - 8).to(DOT) * t + c
    return w0, w1, w2, w3


@triton.jit
def unpack_int8(words, DOT: tl.constexpr):
    """Return the low and the high bytes of words int16 as signed numbers."""
    if DOT == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _INT8_TO_BFLOAT16, "=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif DOT == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _INT8_TO_FLOAT16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        x = words.to(tl.int32)
        low, high = (x << 24 >> 24).to(DOT), (x >> 8).to(DOT)
    return low, high


@triton.jit
def split_scales(words):
    """Return the low and the high halves of 32-bit words, float16, as float32."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def multiply_halves(a, b, x, y, total, PRECISION: tl.constexpr):
    """Add the products with the two halves of a group to a total [outputs, tokens]."""
    total = tl.dot(a, x, total, input_precision=PRECISION)
    return tl.dot(b, y, total, input_precision=PRECISION)


@triton.jit
def sum_inputs(x, y):
    """Return the float32 sums of the inputs of two halves [inputs, tokens]: [tokens]."""
    return tl.sum(x.to(tl.float32), 0) + tl.sum(y.to(tl.float32), 0)


@triton.jit(do_not_specialize=["tokens", "steps", "split_steps"])
def multiply_packed(
    x, x_row, words, scales, partial, tokens, n, width, steps, split_steps,
    BITS: tl.constexpr, SECOND: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Set partial[split, t, :n] to the products of x[t] and the rows of a tile over one split of the inputs.

    SECOND: what a group has beside its scale, see PackedMatrix.
    """
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    WORDS: tl.constexpr = TILE_ROWS * HALF  # of a group of 8 bits, or of two of 4
    row, i = tl.arange(0, TILE_ROWS), tl.arange(0, HALF)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    at_x = x + t.to(tl.int64)[None, :] * x_row + i[:, None]
    is_token = (t < tokens)[None, :]
    at_words = words + tile * steps * (WORDS * BITS // 4) + row[:, None] * HALF + i[None, :]
    SCALES: tl.constexpr = TILE_ROWS if SECOND == "nothing" else 2 * TILE_ROWS  # words of a step
    at_scales = scales + tile * steps * SCALES + row
    total = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    zeros = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    begin = split * split_steps
    for step in tl.range(begin, tl.minimum(begin + split_steps, steps), num_stages=STAGES):
        at_step = at_x + step * (4 * HALF)
        x0 = tl.load(at_step, mask=is_token, other=0.0).to(DOT)
        x1 = tl.load(at_step + HALF, mask=is_token, other=0.0).to(DOT)
        is_input = is_token & (step * (4 * HALF) + 2 * HALF < width)
        x2 = tl.load(at_step + 2 * HALF, mask=is_input, other=0.0).to(DOT)
        x3 = tl.load(at_step + 3 * HALF, mask=is_input, other=0.0).to(DOT)
        scale, second = split_scales(tl.load(at_scales + step * SCALES))
        if SECOND != "nothing":
            next_scale, next_second = split_scales(tl.load(at_scales + step * SCALES + TILE_ROWS))
        if BITS == 4:
            w0, w1, w2, w3 = unpack_int4(
                tl.load(at_words + step * WORDS),
                scale, second + 8 * scale, next_scale, next_second + 8 * next_scale, DOT,
            )  # fmt: skip
            total = multiply_halves(w0, w1, x0, x1, total, PRECISION)
            total = multiply_halves(w2, w3, x2, x3, total, PRECISION)
        else:
            w0, w1 = unpack_int8(tl.load(at_words + step * (2 * WORDS)), DOT)
            w2, w3 = unpack_int8(tl.load(at_words + step * (2 * WORDS) + WORDS), DOT)
            if SECOND == "scale":
                total += tl.dot(w0, x0, zeros, input_precision=PRECISION) * scale[:, None]
                total += tl.dot(w1, x1, zeros, input_precision=PRECISION) * second[:, None]
                total += tl.dot(w2, x2, zeros, input_precision=PRECISION) * next_scale[:, None]
                total += tl.dot(w3, x3, zeros, input_precision=PRECISION) * next_second[:, None]
            elif SECOND == "shift":
                total += multiply_halves(w0, w1, x0, x1, zeros, PRECISION) * scale[:, None]
                total += sum_inputs(x0, x1)[None, :] * second[:, None]
                total += multiply_halves(w2, w3, x2, x3, zeros, PRECISION) * next_scale[:, None]
                total += sum_inputs(x2, x3)[None, :] * next_second[:, None]
            else:
                total += multiply_halves(w0, w1, x0, x1, zeros, PRECISION) * scale[:, None]
                total += multiply_halves(w2, w3, x2, x3, zeros, PRECISION) * second[:, None]
    out = tile * TILE_ROWS + row
    to = partial + (split * tokens + t)[None, :].to(tl.int64) * n + out[:, None]
    tl.store(to, total, mask=is_token & (out < n)[:, None])


@triton.jit(do_not_specialize=["tokens", "splits"])
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


@triton.jit(do_not_specialize=["rows", "steps"])
def unpack_rows(
    index, words, scales, out, rows, width, steps,
    BITS: tl.constexpr, SECOND: tl.constexpr, INDEXED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Set out[r] to row index[r] of the dense matrix, or to row r of it; out [rows, width]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step, i = tl.program_id(1), tl.arange(0, 4 * HALF)[None, :]
    row = (tl.load(index + r, mask=r < rows, other=0) if INDEXED else r).to(tl.int64)[:, None]
    mask = (r < rows)[:, None] & (step * (4 * HALF) + i < width)
    place = row // TILE_ROWS * steps + step
    at = place * (TILE_ROWS * HALF * BITS // 4) + row % TILE_ROWS * HALF + i % HALF
    SCALES: tl.constexpr = TILE_ROWS if SECOND == "nothing" else 2 * TILE_ROWS  # words of a step
    at_scale = scales + place * SCALES + row % TILE_ROWS + i // (2 * HALF) * (SCALES - TILE_ROWS)
    scale, second = split_scales(tl.load(at_scale, mask=mask, other=0))
    if BITS == 4:
        x = tl.load(words + at, mask=mask, other=0).to(tl.int32) >> i // HALF * 4 & 15
    else:
        x = tl.load(words + at + i // (2 * HALF) * (TILE_ROWS * HALF), mask=mask, other=0).to(tl.int32)
        x = x << 24 - i // HALF % 2 * 8 >> 24
    if SECOND == "shift":
        y = x.to(tl.float32) * scale + second
    elif SECOND == "scale":
        y = x.to(tl.float32) * tl.where(i // HALF % 2 == 0, scale, second)
    else:
        y = x.to(tl.float32) * tl.where(i < 2 * HALF, scale, second)
    to = out + r.to(tl.int64)[:, None] * width + step * (4 * HALF) + i
    tl.store(to, y.to(out.dtype.element_ty), mask=mask)
