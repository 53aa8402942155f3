"""The grouped products of experts: a program multiplies some rows of one expert with some of its outputs."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.unpack_kernels import HALF, TILE_ROWS
from retain.kernels.triton.weight_kernels import multiply_tiles


@triton.jit
def load_choices(order, block_first, expert_end, expert, ROWS: tl.constexpr):
    """Return the choices of a program's block, which are of this expert, and which of its rows have one."""
    i = tl.load(block_first + tl.program_id(0)) + tl.arange(0, ROWS)
    valid = i < tl.load(expert_end + expert)
    return tl.load(order + i, mask=valid, other=0).to(tl.int64), valid


@triton.jit
def grouped_linear(
    x, x_row, weight, bias, out, order, block_expert, block_first, expert_end, num_experts, choices_per_row, n, width,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Set out[c, :n] = x[c // choices_per_row] W_e^T + b_e for the choices c of a block; W_e is [n, width]."""
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < num_experts:
        choice, valid = load_choices(order, block_first, expert_end, expert, ROWS)
        column = tl.program_id(1) * OUT + tl.arange(0, OUT)
        rows = x + (choice // choices_per_row)[:, None] * x_row
        columns = weight + (expert.to(tl.int64) * n + column)[:, None] * width
        total = tl.zeros((ROWS, OUT), tl.float32)
        for begin in range(0, width, IN):
            j = begin + tl.arange(0, IN)[None, :]
            a = tl.load(rows + j, mask=valid[:, None] & (j < width), other=0.0)
            b = tl.load(columns + j, mask=(column < n)[:, None] & (j < width), other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
        if BIAS:
            total += tl.load(bias + expert * n + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        to = out + choice[:, None] * n + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=valid[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["num_choices", "num_k_tiles", "k_tiles_per_split"])
def multiply_packed_experts(
    x, x_row, words, scales, bias, out, order, block_expert, block_first, expert_end, num_experts, choices_per_row,
    num_choices, n, width, num_k_tiles, k_tiles_per_split,
    FORMAT: tl.constexpr, GROUP_EXTRA: tl.constexpr, WORDS: tl.constexpr, SCALES: tl.constexpr, TOKENS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute grouped_linear with packed weights, each tile of which a program unpacks for all of its rows.

    With SPLIT, set out[split, c, :n] to the products over one split of the inputs; the first has the bias.
    """
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < num_experts:
        choice, valid = load_choices(order, block_first, expert_end, expert, TOKENS)
        tile = expert.to(tl.int64) * tl.cdiv(n, TILE_ROWS) + tl.program_id(1)
        at_x = x + (choice // choices_per_row)[None, :] * x_row + tl.arange(0, HALF)[:, None]
        begin = tl.program_id(2) * k_tiles_per_split if SPLIT else 0
        column = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        earlier = tl.zeros((TILE_ROWS, 1), tl.float32)
        if BIAS:
            mask = (column < n) & (begin == 0)
            earlier += tl.load(bias + expert * n + column, mask=mask, other=0.0).to(tl.float32)[:, None]
        total = multiply_tiles(
            tl.broadcast_to(earlier, (TILE_ROWS, TOKENS)), at_x, valid[None, :],
            words + tile * num_k_tiles * WORDS, scales + tile * num_k_tiles * SCALES,
            begin, tl.minimum(begin + k_tiles_per_split, num_k_tiles) if SPLIT else num_k_tiles,
            width, k_tiles_per_split,
            FORMAT, GROUP_EXTRA, WORDS, SCALES, TOKENS, DOT, PRECISION, STAGES, SPLIT,
        )  # fmt: skip
        row = choice + tl.program_id(2) * num_choices
        to = out + row[None, :] * n + column[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=valid[None, :] & (column < n)[:, None])


@triton.jit
def mix_choices(y, weights, out, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """Set out[t] to the sum of the rows y[t K + r] times weights[t, r], in the order of r."""
    t, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(K):
        row = tl.load(y + (t * K + r) * n + i, mask=i < n, other=0.0).to(tl.float32)
        total += row * tl.load(weights + t * K + r)
    tl.store(out + t * n + i, total.to(out.dtype.element_ty), mask=i < n)
