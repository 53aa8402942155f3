"""Kernels of packed weights (packed_weight.py draws them): products with few rows, and the numbers of chosen rows.

A word is loaded once. Its numbers become bfloat16 or float16 by bit patterns (unpack_kernels.py), and tensor cores
multiply them with the rows. Int4 is rounded with its scales and shifts, as in a dense matrix. The numbers of all other
formats are exact, and the scale of each group of 32, or of 16, multiplies float32 sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.unpack_kernels import (
    HALF,
    TILE_ROWS,
    look_up,
    split_scales,
    unpack_codebook,
    unpack_int4,
    unpack_int6,
    unpack_int8,
)


@triton.jit
def multiply_halves(a, b, x, y, total, PRECISION: tl.constexpr):
    """Add the products with the two halves of a group to a total [outputs, tokens]."""
    total = tl.dot(a, x, total, input_precision=PRECISION)
    return tl.dot(b, y, total, input_precision=PRECISION)


@triton.jit
def sum_inputs(x, y):
    """Return the float32 sums of the inputs of two halves [inputs, tokens]: [tokens]."""
    return tl.sum(x.to(tl.float32), 0) + tl.sum(y.to(tl.float32), 0)


@triton.jit
def load_numbers(words, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Return the numbers of the four halves of a tile, [outputs, 16] each, of a format without shifts in them."""
    at = tl.arange(0, TILE_ROWS)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    if FORMAT == "int8":
        w0, w1 = unpack_int8(tl.load(words + at), DOT)
        w2, w3 = unpack_int8(tl.load(words + TILE_ROWS * HALF + at), DOT)
    elif FORMAT == "int6":
        tops = (words + TILE_ROWS * HALF).to(tl.pointer_type(tl.int8))
        # Threads then load as many bytes as words, in one layout: else numbers would be unpacked before it is changed.
        at_tops = tops + tl.max_contiguous(at, (1, 8))
        w0, w1, w2, w3 = unpack_int6(tl.load(words + at), tl.load(at_tops), DOT)
    else:
        w0, w1, w2, w3 = unpack_codebook(tl.load(words + at), FORMAT, DOT)
    return w0, w1, w2, w3


@triton.jit
def multiply_tiles(
    earlier, at_x, is_token, words, scales, begin, end, width, k_tiles_per_split,
    FORMAT: tl.constexpr, GROUP_EXTRA: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, TOKENS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return `earlier` plus the products [outputs, tokens] of rows of x and tiles `begin` to `end` of a row of tiles.

    With SPLIT these are one split. Else the sums of several are added one after another, as add_splits does.

    `at_x` [16, tokens] is where the first numbers of the rows are. A tile has WORDS words of
    16 bits, and SCALES of 32. FORMAT and GROUP_EXTRA: see DeviceWeight.
    """
    row = tl.arange(0, TILE_ROWS)
    at = row[:, None] * HALF + tl.arange(0, HALF)[None, :]
    total = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    zeros = tl.zeros((TILE_ROWS, TOKENS), tl.float32)
    for k_tile in tl.range(begin, end, num_stages=STAGES):
        at_k_tile = at_x + k_tile * (4 * HALF)
        x0 = tl.load(at_k_tile, mask=is_token, other=0.0).to(DOT)
        x1 = tl.load(at_k_tile + HALF, mask=is_token, other=0.0).to(DOT)
        is_input = is_token & (k_tile * (4 * HALF) + 2 * HALF < width)
        x2 = tl.load(at_k_tile + 2 * HALF, mask=is_input, other=0.0).to(DOT)
        x3 = tl.load(at_k_tile + 3 * HALF, mask=is_input, other=0.0).to(DOT)
        scale, second = split_scales(tl.load(scales + k_tile * SCALES + row))
        if GROUP_EXTRA != "nothing":
            next_scale, next_second = split_scales(tl.load(scales + k_tile * SCALES + TILE_ROWS + row))
        if FORMAT == "int4":
            w0, w1, w2, w3 = unpack_int4(
                tl.load(words + k_tile * WORDS + at),
                scale, second + 8 * scale, next_scale, next_second + 8 * next_scale, DOT,
            )  # fmt: skip
            total = multiply_halves(w0, w1, x0, x1, total, PRECISION)
            total = multiply_halves(w2, w3, x2, x3, total, PRECISION)
        else:
            w0, w1, w2, w3 = load_numbers(words + k_tile * WORDS, FORMAT, DOT)
            if GROUP_EXTRA == "scale":
                total += tl.dot(w0, x0, zeros, input_precision=PRECISION) * scale[:, None]
                total += tl.dot(w1, x1, zeros, input_precision=PRECISION) * second[:, None]
                total += tl.dot(w2, x2, zeros, input_precision=PRECISION) * next_scale[:, None]
                total += tl.dot(w3, x3, zeros, input_precision=PRECISION) * next_second[:, None]
            elif GROUP_EXTRA == "shift":
                total += multiply_halves(w0, w1, x0, x1, zeros, PRECISION) * scale[:, None]
                total += sum_inputs(x0, x1)[None, :] * second[:, None]
                total += multiply_halves(w2, w3, x2, x3, zeros, PRECISION) * next_scale[:, None]
                total += sum_inputs(x2, x3)[None, :] * next_second[:, None]
            else:
                total += multiply_halves(w0, w1, x0, x1, zeros, PRECISION) * scale[:, None]
                total += multiply_halves(w2, w3, x2, x3, zeros, PRECISION) * second[:, None]
        if not SPLIT:  # noqa: SIM102 (known when the kernel is compiled)
            if (k_tile + 1) % k_tiles_per_split == 0:
                if DOT != tl.float32:  # as the interpreter has it
                    # Keeps the branch: without it each step computes both cases and chooses. A barrier of the whole
                    # program would end the pipelining of loads.
                    tl.inline_asm_elementwise(
                        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [k_tile],
                        dtype=tl.int32, is_pure=False, pack=1,
                    )  # fmt: skip
                earlier += total
                total = zeros
    return earlier + total


@triton.jit(do_not_specialize=["tokens", "num_k_tiles", "k_tiles_per_split"])
def multiply_packed(
    x, x_row, words, scales, partial, tokens, n, width, num_k_tiles, k_tiles_per_split,
    FORMAT: tl.constexpr, GROUP_EXTRA: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, TOKENS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Set partial[split, t, :n] to the products of x[t] and the rows of a tile over one split of the inputs."""
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.arange(0, TOKENS)
    at_x = x + t.to(tl.int64)[None, :] * x_row + tl.arange(0, HALF)[:, None]
    is_token = (t < tokens)[None, :]
    begin = split * k_tiles_per_split
    total = multiply_tiles(
        0.0, at_x, is_token, words + tile * num_k_tiles * WORDS, scales + tile * num_k_tiles * SCALES,
        begin, tl.minimum(begin + k_tiles_per_split, num_k_tiles), width, k_tiles_per_split,
        FORMAT, GROUP_EXTRA, WORDS, SCALES, TOKENS, DOT, PRECISION, STAGES, SPLIT=True,
    )  # fmt: skip
    out = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    to = partial + (split * tokens + t)[None, :].to(tl.int64) * n + out[:, None]
    tl.store(to, total, mask=is_token & (out < n)[:, None])


@triton.jit(do_not_specialize=["tokens", "splits"])
def add_splits(
    partial, bias, out, out_row, tokens, n, splits,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Set out[t] to the sum of a row's splits in their order, with a bias if any, and with out[t] if ADD."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * tokens + t) * n + i, mask=(split < splits) & (i < n), other=0.0)
    if BIAS:
        total += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    to = out + t * out_row + i
    if ADD:
        total += tl.load(to, mask=i < n, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["rows", "num_k_tiles"])
def unpack_rows(
    index, words, scales, out, rows, width, num_k_tiles,
    FORMAT: tl.constexpr, GROUP_EXTRA: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, INDEXED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Set out[r] to row index[r] of the dense matrix, or to row r of it; out [rows, width]."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k_tile, i = tl.program_id(1), tl.arange(0, 4 * HALF)[None, :]
    row = (tl.load(index + r, mask=r < rows, other=0) if INDEXED else r).to(tl.int64)[:, None]
    mask = (r < rows)[:, None] & (k_tile * (4 * HALF) + i < width)
    tile = row // TILE_ROWS * num_k_tiles + k_tile
    at_tile = words + tile * WORDS
    at = row % TILE_ROWS * HALF + i % HALF
    at_scale = scales + tile * SCALES + row % TILE_ROWS + i // (2 * HALF) * (SCALES - TILE_ROWS)
    scale, second = split_scales(tl.load(at_scale, mask=mask, other=0))
    half = i // HALF
    if FORMAT == "int8":
        x = tl.load(at_tile + at + half // 2 * (TILE_ROWS * HALF), mask=mask, other=0).to(tl.int32)
        x = x << 24 - half % 2 * 8 >> 24
    else:
        x = tl.load(at_tile + at, mask=mask, other=0).to(tl.int32) >> half * 4 & 15
        if FORMAT == "int6":
            tops = (at_tile + TILE_ROWS * HALF).to(tl.pointer_type(tl.int8)) + at
            x = (x | (tl.load(tops, mask=mask, other=0).to(tl.int32) >> half * 2 & 3) << 4) - 32
        elif FORMAT != "int4":
            x = look_up(x, FORMAT)
    if GROUP_EXTRA == "shift":
        y = x.to(tl.float32) * scale + second
    elif GROUP_EXTRA == "scale":
        y = x.to(tl.float32) * tl.where(half % 2 == 0, scale, second)
    else:
        y = x.to(tl.float32) * tl.where(half < 2, scale, second)
    to = out + r.to(tl.int64)[:, None] * width + k_tile * (4 * HALF) + i
    tl.store(to, y.to(out.dtype.element_ty), mask=mask)
