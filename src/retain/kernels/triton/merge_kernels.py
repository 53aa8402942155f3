"""The kernel that combines the splits of decode tiles: those of a table, of its demoted tokens, and the sink logits."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.decode_kernels import MAX_SPLITS, split_blocks
from retain.kernels.triton.noise import LOG2E, PLAIN, mean_noise
from retain.kernels.triton.softmax import finite_or_zero, safe_log2

CHUNK = tl.constexpr(8)  # splits that are added at once: as many for any request, so that a sum has one order


@triton.jit
def count_splits(counts, S: tl.constexpr, N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Return the splits of a table."""
    _, _, splits = split_blocks(tl.load(counts) * S, N, MIN_BLOCKS)
    return splits


@triton.jit
def find_maximum(high, split_max, first, splits, width, m, valid):
    """Return the larger of `high` and the maxima of splits, for rows m [ROWS]."""
    s = tl.arange(0, MAX_SPLITS)[None, :]
    at = (first + s) * width + m[:, None]
    maxima = tl.load(split_max + at, mask=valid[:, None] & (s < splits), other=float("-inf"))
    return tl.maximum(high, tl.max(maxima, 1))


@triton.jit
def add_sums(total, high, split_max, split_sum, first, splits, width, m, valid):
    """Add the sums of splits to totals [ROWS] that are relative to the maxima `high`."""
    s = tl.arange(0, CHUNK)[None, :]
    for c in range(0, splits, CHUNK):
        exists = valid[:, None] & (c + s < splits)
        at = (first + c + s) * width + m[:, None]
        maxima = tl.load(split_max + at, mask=exists, other=float("-inf"))
        sums = tl.load(split_sum + at, mask=exists, other=0.0)
        total += tl.sum(sums * tl.exp2(maxima - finite_or_zero(high)[:, None]), 1)
    return total


@triton.jit
def add_outputs(
    out, high, split_max, split_out, first, splits, width, m, valid, V: tl.constexpr, VP: tl.constexpr
):  # fmt: skip
    """Add the outputs of splits to outputs [ROWS, VP] that are relative to the maxima `high`."""
    s, e = tl.arange(0, CHUNK)[None, :], tl.arange(0, VP)
    for c in range(0, splits, CHUNK):
        exists = valid[:, None] & (c + s < splits)
        at = (first + c + s) * width + m[:, None]
        maxima = tl.load(split_max + at, mask=exists, other=float("-inf"))
        factor = tl.exp2(maxima - finite_or_zero(high)[:, None])
        parts = tl.load(
            split_out + at.to(tl.int64)[:, :, None] * V + e[None, None, :],
            mask=exists[:, :, None] & (e < V)[None, None, :],
            other=0.0,
        )
        out += tl.sum(parts * factor[:, :, None], 1)
    return out


@triton.jit
def add_sink(high, total, sink):
    """Add a sink logit in base 2 to the sum of a row's splits; the sum of a row that sees nothing stays."""
    return total + tl.where(high > float("-inf"), tl.exp2(sink - finite_or_zero(high)), 0.0)


@triton.jit(
    do_not_specialize=[
        "split_max", "split_sum", "counts", "demoted_counts", "width", "num_splits", "first_demoted"
    ]
)  # fmt: skip
def merge_splits(
    o, split_max, split_sum, split_out, width, counts, count_row, count_head, tiles, num_splits, lse,
    sinks, temperature, noise,
    demoted_counts, demoted_row, demoted_head, first_demoted,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    N: tl.constexpr, MIN_BLOCKS: tl.constexpr, ROWS: tl.constexpr, UPDATE_MASS: tl.constexpr,
    DEMOTED_S: tl.constexpr, DEMOTED_N: tl.constexpr, DEMOTED_MIN_BLOCKS: tl.constexpr,
    SINKS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Combine the splits of ROWS rows of a tile into their output; with UPDATE_MASS also into lse, in base 2.

    With DEMOTED_S, the slots of a page of demoted tokens, splits from `first_demoted`
    on are theirs.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    row, first, tokens = tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS >= tokens * R:
        return
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    at = (j * G + g) * num_splits
    demoted_at = at + first_demoted
    splits = count_splits(counts + row * count_row + g * count_head, S, N, MIN_BLOCKS)
    demoted_splits = 0
    if DEMOTED_S:
        at_count = demoted_counts + row * demoted_row + g * demoted_head
        demoted_splits = count_splits(at_count, DEMOTED_S, DEMOTED_N, DEMOTED_MIN_BLOCKS)
    e = tl.arange(0, VP)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    high = find_maximum(high, split_max, at, splits, width, m, valid)
    if DEMOTED_S:
        high = find_maximum(high, split_max, demoted_at, demoted_splits, width, m, valid)
    total, out = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VP), tl.float32)
    total = add_sums(total, high, split_max, split_sum, at, splits, width, m, valid)
    out = add_outputs(out, high, split_max, split_out, at, splits, width, m, valid, V, VP)
    if DEMOTED_S:
        total = add_sums(total, high, split_max, split_sum, demoted_at, demoted_splits, width, m, valid)
        out = add_outputs(out, high, split_max, split_out, demoted_at, demoted_splits, width, m, valid, V, VP)
    if SINKS:
        sink = tl.load(sinks + h, mask=valid, other=0.0) * LOG2E
        total = add_sink(high, total, sink)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    at_row = (t * G * R + h).to(tl.int64)
    tl.store(o + at_row[:, None] * V + e[None, :], out.to(o.dtype.element_ty), mask=valid[:, None] & (e < V)[None, :])
    if UPDATE_MASS:
        if NOISE != PLAIN:
            z_at = tl.num_programs(0) * G * num_splits * width
            z_max, z_sum = split_max + z_at, split_sum + z_at
            high = find_maximum(tl.full((ROWS,), float("-inf"), tl.float32), z_max, at, splits, width, m, valid)
            if DEMOTED_S:
                high = find_maximum(high, z_max, demoted_at, demoted_splits, width, m, valid)
            total = add_sums(tl.zeros((ROWS,), tl.float32), high, z_max, z_sum, at, splits, width, m, valid)
            if DEMOTED_S:
                total = add_sums(total, high, z_max, z_sum, demoted_at, demoted_splits, width, m, valid)
            if SINKS:
                sink += mean_noise(tl.load(noise + tl.load(tiles + 6 * j)), NOISE)
                total = add_sink(high, total, sink / tl.load(temperature + t, mask=valid, other=1.0))
        tl.store(lse + at_row, high + safe_log2(total), mask=valid)
