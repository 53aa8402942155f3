"""The grouped product of experts: a program multiplies some rows of one expert with some of its outputs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_linear(
    x, x_row, weight, bias, out, order, block_expert, block_first, expert_end, num_experts, choices_per_row, n, width,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Set out[c, :n] = x[c // choices_per_row] W_e^T + b_e for the choices c of a block; W_e is [n, width]."""
    expert = tl.load(block_expert + tl.program_id(0))
    if expert < num_experts:
        i = tl.load(block_first + tl.program_id(0)) + tl.arange(0, ROWS)
        valid = i < tl.load(expert_end + expert)
        choice = tl.load(order + i, mask=valid, other=0).to(tl.int64)
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
