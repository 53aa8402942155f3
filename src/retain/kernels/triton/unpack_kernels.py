"""How words of 16 bits become the numbers of packed weights (packed_weight.py says what is where in them).

Two words in a register become pairs of bfloat16 or float16 by bit patterns (see quantized_loads.py). Of a codebook, a
byte permutation looks up four numbers at once: four registers hold its 16 bytes. Floats of 4 bits (e2m1) have their
bits moved to those of a larger float, whose exponent a product corrects. Where no assembly runs, for float32 and in the
interpreter, integer operations give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from retain.kernels.weights.quantized import IQ4, MXFP4

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


def _int6_asm(base: int, one: int, offset: int, dtype: str) -> str:
    """Return code for two words in a register, and two more with a byte each: nibbles with two bits above, less 32."""
    lines = [".reg .b32 x, y, one, offset;", f"mov.b32 one, {one:#x};", f"mov.b32 offset, {offset:#x};"]
    for i in range(4):
        lines += [
            f"shr.u32 x, $4, {4 * i};",
            f"lop3.b32 x, x, 0x000f000f, {base:#x}, 0xea;",
            _shift("y", "$5", 4 - 2 * i),
            "lop3.b32 x, y, 0x00300030, x, 0xea;",
            f"fma.rn.{dtype} ${i}, x, one, offset;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


def _e2m1_asm(mantissa: int, factor: int, dtype: str) -> str:
    """Return code for two words in a register: the nibbles of both, floats of a sign and bits e2m1, doubled.

    `mantissa` is the place of the lowest bit in the larger float.
    """
    mask = 7 << mantissa
    lines = [".reg .b32 x, y, factor, zero;", f"mov.b32 factor, {factor:#x};", "mov.b32 zero, 0x80008000;"]  # -0
    for i in range(4):
        lines += [
            _shift("x", "$4", mantissa - 4 * i),
            f"and.b32 x, x, {mask << 16 | mask:#x};",
            _shift("y", "$4", 12 - 4 * i),
            "lop3.b32 x, y, 0x80008000, x, 0xea;",
            f"fma.rn.{dtype} ${i}, x, factor, zero;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


def _codebook_asm(codebook: Sequence[int]) -> str:
    """Return code for two words in a register: the numbers of their lower two nibbles as words of bytes, then of two.

    A selector takes the lower three bits of four nibbles, once for each half of the codebook; the highest bits choose.
    """
    table = [int.from_bytes(bytes(n & 0xFF for n in codebook[i : i + 4]), "little") for i in range(0, 16, 4)]
    lines = [".reg .b32 a, b, c, low, high, t0, t1, t2, t3;"]
    lines += [f"mov.b32 t{i}, {x:#x};" for i, x in enumerate(table)]
    lines += ["and.b32 low, $2, 0x77777777;", "shr.u32 high, $2, 1;"]
    lines += ["lop3.b32 high, high, 0x44444444, 0x32103210, 0xea;"]
    for word in "ab":
        lines += [f"prmt.b32 {word}, t0, t1, low;", "prmt.b32 c, t2, t3, low;", f"prmt.b32 {word}, {word}, c, high;"]
        lines += ["shr.u32 low, low, 16;", "shr.u32 high, high, 16;"] if word == "a" else []
    lines += ["prmt.b32 $0, a, b, 0x5410;", "prmt.b32 $1, a, b, 0x7632;"]
    return "{\n" + "\n".join(lines) + "\n}"


def _shift(to: str, source: str, left: int) -> str:
    """Return an instruction that shifts a register to the left, or to the right."""
    return f"shl.b32 {to}, {source}, {left};" if left > 0 else f"shr.u32 {to}, {source}, {-left};"


def _table(codebook: Sequence[int]) -> int:
    """Return the bytes of half a codebook in 64 bits."""
    return int.from_bytes(bytes(n & 0xFF for n in codebook), "little", signed=True)


_NIBBLES_TO_BFLOAT16 = tl.constexpr(_nibbles_asm(0x43004300, 0x3F803F80, 0xC308C308, "bf16x2"))  # 128 + n, less 136
_NIBBLES_TO_FLOAT16 = tl.constexpr(_nibbles_asm(0x64006400, 0x3C003C00, 0xE408E408, "f16x2"))  # 1024 + n, less 1032
_INT6_TO_BFLOAT16 = tl.constexpr(_int6_asm(0x43004300, 0x3F803F80, 0xC320C320, "bf16x2"))  # less 160
_INT6_TO_FLOAT16 = tl.constexpr(_int6_asm(0x64006400, 0x3C003C00, 0xE420E420, "f16x2"))  # less 1056
_E2M1_TO_BFLOAT16 = tl.constexpr(_e2m1_asm(6, 0x7F007F00, "bf16x2"))  # times 2**127
_E2M1_TO_FLOAT16 = tl.constexpr(_e2m1_asm(9, 0x78007800, "f16x2"))  # times 2**15
_IQ4_TO_INT8 = tl.constexpr(_codebook_asm(IQ4.CODEBOOK))
_IQ4_LOW, _IQ4_HIGH = tl.constexpr(_table(IQ4.CODEBOOK[:8])), tl.constexpr(_table(IQ4.CODEBOOK[8:]))
_E2M1_LOW, _E2M1_HIGH = tl.constexpr(_table(MXFP4.CODEBOOK[:8])), tl.constexpr(_table(MXFP4.CODEBOOK[8:]))
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
    if DOT == tl.float32:
        x = words.to(tl.int32)
        w0, w1 = ((x & 15) - 8).to(DOT) * s + b, ((x >> 4 & 15) - 8).to(DOT) * s + b
        w2, w3 = ((x >> 8 & 15) - 8).to(DOT) * t + c, ((x >> 12 & 15) - 8).to(DOT) * t + c
    else:
        ASM: tl.constexpr = _NIBBLES_TO_BFLOAT16 if DOT == tl.bfloat16 else _NIBBLES_TO_FLOAT16
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r", [words, s, b, t, c],
            dtype=(DOT.value, DOT.value, DOT.value, DOT.value), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def unpack_int8(words, DOT: tl.constexpr):
    """Return the low and the high bytes of words int16 as signed numbers."""
    if DOT == tl.float32:
        x = words.to(tl.int32)
        low, high = (x << 24 >> 24).to(DOT), (x >> 8).to(DOT)
    else:
        ASM: tl.constexpr = _INT8_TO_BFLOAT16 if DOT == tl.bfloat16 else _INT8_TO_FLOAT16
        low, high = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r", [words], dtype=(DOT.value, DOT.value), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def unpack_int6(words, tops, DOT: tl.constexpr):
    """Return the four nibbles of words int16, lowest first, with two bits each of bytes above them, less 32."""
    if DOT == tl.float32:
        x, y = words.to(tl.int32), tops.to(tl.int32)
        w0, w1 = ((x & 15 | (y & 3) << 4) - 32).to(DOT), ((x >> 4 & 15 | (y >> 2 & 3) << 4) - 32).to(DOT)
        w2, w3 = ((x >> 8 & 15 | (y >> 4 & 3) << 4) - 32).to(DOT), ((x >> 12 & 15 | (y >> 6 & 3) << 4) - 32).to(DOT)
    else:
        ASM: tl.constexpr = _INT6_TO_BFLOAT16 if DOT == tl.bfloat16 else _INT6_TO_FLOAT16
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r,r", [words, tops.to(tl.int16)],
            dtype=(DOT.value, DOT.value, DOT.value, DOT.value), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def unpack_codebook(words, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Return the numbers of a codebook for the four nibbles of words int16, lowest first."""
    if DOT == tl.float32:
        x = words.to(tl.int32)
        w0, w1 = look_up(x & 15, FORMAT).to(DOT), look_up(x >> 4 & 15, FORMAT).to(DOT)
        w2, w3 = look_up(x >> 8 & 15, FORMAT).to(DOT), look_up(x >> 12 & 15, FORMAT).to(DOT)
    elif FORMAT == "iq4":
        low, high = tl.inline_asm_elementwise(
            _IQ4_TO_INT8, "=&r,=&r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
        )
        w0, w1 = unpack_int8(low, DOT)
        w2, w3 = unpack_int8(high, DOT)
    else:
        ASM: tl.constexpr = _E2M1_TO_BFLOAT16 if DOT == tl.bfloat16 else _E2M1_TO_FLOAT16
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(DOT.value, DOT.value, DOT.value, DOT.value), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def look_up(n, FORMAT: tl.constexpr):
    """Return the numbers of a codebook at places int32, as int8."""
    LOW: tl.constexpr = _IQ4_LOW if FORMAT == "iq4" else _E2M1_LOW
    HIGH: tl.constexpr = _IQ4_HIGH if FORMAT == "iq4" else _E2M1_HIGH
    return (tl.where(n < 8, LOW, HIGH) >> ((n & 7) * 8).to(tl.int64)).to(tl.int8)


@triton.jit
def split_scales(words):
    """Return the low and the high halves of 32-bit words, float16, as float32."""
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)
