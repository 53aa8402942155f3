"""Loads of K and V for products: numbers of 16 or 32 bits as they are, those of 8 and 4 bits as exact small floats.

Bytes are loaded once, 16 at a time, and asynchronously. Two scales are loaded as a word of 32 bits, because loads of 2
bytes cannot be asynchronous. Integers become floats by bit patterns, not by conversions, which run at a fraction of the
speed: 0x6400 | n is 1024 + n in float16, 0x4300 | n is 128 + n in bfloat16.

Decode tiles load V of 8 bits, and K of fp8, as pairs: two numbers in an element of 16 bits. Hopper transposes nothing
smaller when it loads from shared memory, and V must be transposed. A pair that becomes two tiles of float16 keeps the
layout in which it was loaded, so no thread exchanges what it has converted. K of int8 is multiplied as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


def _int8_to_float16(shift: int) -> tl.constexpr:
    """Return code that makes float16 of one int8 of each of two pairs in a register, those `shift` bits up.

    lop3 of 0x6a is (a & b) ^ c, which sets the bits of 1024 and flips the sign bit of the integers: that makes them 128
    too high.
    """
    return tl.constexpr(f"""{{
.reg .b32 x, offset;
mov.b32 offset, 0x64806480;
shr.u32 x, $1, {shift};
lop3.b32 x, x, 0x00ff00ff, offset, 0x6a;
sub.rn.f16x2 $0, x, offset;
}}""")


def _fp8_to_float16(selector: int) -> tl.constexpr:
    """Return code that makes float16 of one byte of e4m3 of each of two pairs in a register, from sm_89 on."""
    return tl.constexpr(f"""{{
.reg .b32 x;
.reg .b16 chosen, unused;
prmt.b32 x, $1, 0, {selector:#x};
mov.b32 {{chosen, unused}}, x;
cvt.rn.f16x2.e4m3x2 $0, chosen;
}}""")


_LOW_INT8_TO_FLOAT16, _HIGH_INT8_TO_FLOAT16 = _int8_to_float16(0), _int8_to_float16(8)
_LOW_FP8_TO_FLOAT16, _HIGH_FP8_TO_FLOAT16 = _fp8_to_float16(0x4420), _fp8_to_float16(0x4431)
# Four bytes of e4m3 in a register to four float16, from sm_89 on.
_FP8_TO_FLOAT16 = tl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
# Four bytes in a register to their four low and four high nibbles, less 8, times their scales, in bfloat16.
_NIBBLES_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 y, a, b, c, d, one, offset, zero;
mov.b32 one, 0x3f803f80;
mov.b32 offset, 0xc308c308;
mov.b32 zero, 0x80008000;
shr.u32 y, $4, 4;
prmt.b32 a, $4, 0x43434343, 0x4140;
prmt.b32 b, $4, 0x43434343, 0x4342;
prmt.b32 c, y, 0x43434343, 0x4140;
prmt.b32 d, y, 0x43434343, 0x4342;
and.b32 a, a, 0x430f430f;
and.b32 b, b, 0x430f430f;
and.b32 c, c, 0x430f430f;
and.b32 d, d, 0x430f430f;
fma.rn.bf16x2 a, a, one, offset;
fma.rn.bf16x2 b, b, one, offset;
fma.rn.bf16x2 c, c, one, offset;
fma.rn.bf16x2 d, d, one, offset;
fma.rn.bf16x2 $0, a, $5, zero;
fma.rn.bf16x2 $1, b, $6, zero;
fma.rn.bf16x2 $2, c, $5, zero;
fma.rn.bf16x2 $3, d, $6, zero;
}""")


@triton.jit
def find_slots(table, slot, count, S: tl.constexpr):
    """Return page, place in it, and existence of slots int32 [N] of a table with `count` slots."""
    exists = slot < count
    return tl.load(table + slot // S, mask=exists, other=0).to(tl.int64), slot % S, exists


@triton.constexpr_function
def has_two_pages(S, N):
    """Return whether the N slots of a block are in two pages of S slots at most, and not always in one."""
    return S % N != 0 and (S > N or N == 2 * S)


@triton.jit
def locate_block(table, i, n, last, S: tl.constexpr, N: tl.constexpr):
    """Return the location of slots n [N] of block i: its first page, its second, and the place of slot 0 in the first.

    Page `last` ends the table. Blocks of several small pages, of sizes that N is not twice, have these for each slot.
    """
    if S % N == 0:
        first = tl.load(table + i * N // S).to(tl.int64)
        second, start = first, i * N % S
    elif N == 2 * S:
        first = tl.load(table + 2 * i).to(tl.int64)
        second = tl.load(table + tl.minimum(2 * i + 1, last)).to(tl.int64)
        start = i * 0
    elif S > N:
        first = tl.load(table + i * N // S).to(tl.int64)
        second = tl.load(table + tl.minimum((i * N + N - 1) // S, last)).to(tl.int64)
        start = i * N % S
    else:
        first = tl.load(table + tl.minimum((i * N + n) // S, last)).to(tl.int64)
        second, start = first, (i * N + n) % S - n
    return first, second, start


@triton.jit
def find_block(table, i, n, last, S: tl.constexpr, N: tl.constexpr):
    """Return the pages int64 [N] of slots n of block i, and their places in them; page `last` ends the table."""
    first, second, start = locate_block(table, i, n, last, S, N)
    page, place = first + tl.zeros_like(n), start + n
    if has_two_pages(S, N):
        page, place = tl.where(place < S, first, second), place % S
    return page, place


@triton.jit
def slot_offsets(location, n, S: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets int64 [N] of slots n of WIDTH elements, where pages are PAGE elements apart.

    Both pages are multiplied before one is chosen: these are scalars, and a slot costs a choice and a sum.
    """
    first, second, start = location
    base = first * PAGE + start * WIDTH
    if has_two_pages(S, N):
        base = tl.where(n < S - start, base, second * PAGE + (start - S) * WIDTH)
        if WIDTH % 16 == 0:  # the compiler loses the alignment at the choice, and would load single bytes (Triton 3.9)
            tl.static_assert(PAGE % 16 == 0)
            base = tl.multiple_of(base, 16)
    return base + n * WIDTH


@triton.jit
def load_slot_scales(scales, page, place, there, S: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the scales float32 [N] of slots of 8 bits, 0 for those that are not `there`."""
    at = page * (PAGE // 2) + S * D // 2 + place
    return tl.load(scales + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def run_on_pairs(asm: tl.constexpr, pairs):
    """Return the float16 that the code makes of pairs of bytes, two at a time."""
    return tl.inline_asm_elementwise(asm, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def unpack_bytes(pairs, HIGH: tl.constexpr, DOT: tl.constexpr):
    """Return the low or the high bytes of pairs as floats of DOT: int8 of int16, e4m3 of uint16.

    The interpreter computes in float32, and runs no assembly.
    """
    if pairs.dtype == tl.int16:
        if DOT == tl.float16:
            return run_on_pairs(_HIGH_INT8_TO_FLOAT16 if HIGH else _LOW_INT8_TO_FLOAT16, pairs)
        return (pairs >> 8 * HIGH).to(tl.int8).to(DOT)
    if DOT == tl.float16 and cuda_capability_geq(8, 9):
        return run_on_pairs(_HIGH_FP8_TO_FLOAT16 if HIGH else _LOW_FP8_TO_FLOAT16, pairs)
    return from_fp8((pairs >> 8 * HIGH).to(tl.uint8), DOT)


@triton.jit
def from_fp8(x, DOT: tl.constexpr):
    """Return bytes of e4m3 as floats of DOT: by an instruction for it from sm_89 on, else by bit patterns."""
    if cuda_capability_geq(8, 9):
        numbers = tl.inline_asm_elementwise(_FP8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        bits = x.to(tl.int32)
        small = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(tl.float32, bitcast=True)
        numbers = small * 2.0**120  # its exponent is 7 too high, that of a float32 127
    return numbers.to(DOT)


@triton.jit
def from_nibbles(packed, scale, DOT: tl.constexpr):
    """Return the numbers in the low and in the high nibbles of bytes, times scales of the same shape."""
    if DOT == tl.bfloat16:
        # Impure: else the compiler exchanges bytes between threads before they are unpacked, one at a time.
        lo, hi = tl.inline_asm_elementwise(
            _NIBBLES_TO_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=False,
            pack=4,
        )
    else:
        x, factor = packed.to(tl.int32), scale.to(tl.float32)
        lo, hi = ((x & 15) - 8).to(tl.float32) * factor, ((x >> 4) - 8).to(tl.float32) * factor
    return lo.to(DOT), hi.to(DOT)


@triton.jit
def load_word_halves(words, at, is_high, exists):
    """Return the bfloat16 in the low halves of words, or in the high ones where `is_high` is 1; 0 where none is."""
    x = tl.load(words + at, mask=exists, other=0)
    return (x >> 16 * is_high).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def word_offsets(location, n, S: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr):
    """Return the offsets int64 [N] of words: the scales of slot n and of its neighbour. Pages are PAGE words apart.

    The place of slot 0 is even, because S and N are multiples of 16.
    """
    first, second, start = location
    return slot_offsets((first, second, start // 2), n // 2, S // 2, N // 2, PAGE, 1)


@triton.jit
def load_scales_async(
    words, location, n, exists, S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Return the scales float32 [N] of slots of 8 bits, as halves of words: loads of 2 bytes cannot be asynchronous."""
    at = word_offsets(location, n, S, N, PAGE // 4) + S * D // 4
    return load_word_halves(words, at, n % 2, exists).to(tl.float32)


@triton.jit
def load_nibbles(
    x, words, location, n, exists, S: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return the numbers of slots of 4 bits: low and high nibbles [N, D / 2]. See `first_columns` for their order."""
    B: tl.constexpr = D // 2
    GROUPS: tl.constexpr = D // GROUP
    b, group = tl.arange(0, B), tl.arange(0, GROUPS)
    at = slot_offsets(location, n, S, N, PAGE, B)
    packed = tl.load(x + at[:, None] + b[None, :], mask=exists[:, None], other=0)
    at_words = word_offsets(location, n, S, N, PAGE // 4) + S * D // 8
    scale = load_word_halves(words, at_words[:, None] + group[None, :] * (S // 2), (n % 2)[:, None], exists[:, None])
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, GROUPS, GROUP // 2)), (N, B))
    return from_nibbles(packed, scale, DOT)


@triton.jit
def first_columns(D: tl.constexpr, GROUP: tl.constexpr):
    """Return which of D numbers are in the first halves of groups: those in low nibbles, or with groups of 2 the even.

    The number of the second part is half a group further on.
    """
    byte = tl.arange(0, D // 2)
    return byte // (GROUP // 2) * GROUP + byte % (GROUP // 2)


@triton.jit
def load_vectors(
    x, scales, page, place, d, there,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return numbers d of slots in DOT: [N, DP] of pages, places and `there` [N, 1] and d [1, DP], or transposed.

    Those of 8 bits lack their scales. MASKED: slots that are not `there` are 0, whatever the memory holds.
    """
    exists = (d < D) & there if MASKED else d < D
    if GROUP:  # the second half of each group of numbers is in high nibbles
        byte = d // GROUP * (GROUP // 2) + d % (GROUP // 2)
        packed = tl.load(x + page * PAGE + place * (D // 2) + byte, mask=exists, other=0)
        at_scale = page * (PAGE // 2) + S * D // 4 + d // GROUP * S + place
        scale = tl.load(scales + at_scale, mask=exists, other=0.0).to(tl.float32)
        numbers = ((packed.to(tl.int32) >> (d // (GROUP // 2) % 2 * 4) & 15) - 8).to(tl.float32) * scale
    elif MASKED or D != DP:
        numbers = tl.load(x + page * PAGE + place * D + d, mask=exists, other=0)
    else:
        numbers = tl.load(x + page * PAGE + place * D + d)
    return from_fp8(numbers, DOT) if numbers.dtype == tl.uint8 else numbers.to(DOT)
