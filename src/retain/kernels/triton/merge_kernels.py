"""The kernel that combines the splits of decode tiles: those of a table, of its demoted tokens, and the sink logits."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.attention_kernels import MAX_SPLITS, finite_or_zero, safe_log2, split_size
from retain.kernels.triton.noise import LOG2E, mean_noise


@triton.jit
def find_splits(counts, PAGE_BLOCKS: tl.constexpr):
    """Return which of MAX_SPLITS splits a table has, [1, MAX_SPLITS], and their numbers."""
    blocks = tl.load(counts) * PAGE_BLOCKS
    s = tl.arange(0, MAX_SPLITS)[None, :]
    return s * split_size(blocks) < blocks, s


@triton.jit
def load_sums(split_max, split_sum, at, exists):
    """Return the maxima [ROWS] of rows, and the sums and factors [ROWS, MAX_SPLITS] of their splits."""
    maxima = tl.load(split_max + at, mask=exists, other=float("-inf"))
    sums = tl.load(split_sum + at, mask=exists, other=0.0)
    high = tl.max(maxima, 1)
    return high, sums, tl.exp2(maxima - finite_or_zero(high)[:, None])


@triton.jit
def load_outputs(split_out, at, exists, e, V: tl.constexpr):
    """Return the outputs [ROWS, MAX_SPLITS, VP] of splits."""
    return tl.load(
        split_out + at.to(tl.int64)[:, :, None] * V + e[None, None, :],
        mask=exists[:, :, None] & (e < V)[None, None, :],
        other=0.0,
    )


@triton.jit
def rescale_sums(high, total, more_high, more):
    """Return the larger maxima of two parts, their sum, and the factors of both."""
    largest = tl.maximum(high, more_high)
    a, b = tl.exp2(high - finite_or_zero(largest)), tl.exp2(more_high - finite_or_zero(largest))
    return largest, total * a + more * b, a, b


@triton.jit
def add_sink(high, total, sink):
    """Add a sink logit in base 2 to the sum of a row's splits; the sum of a row that sees nothing stays."""
    return total + tl.where(high > float("-inf"), tl.exp2(sink - finite_or_zero(high)), 0.0)


@triton.jit
def merge_splits(
    o, split_max, split_sum, split_out, width, counts, count_row, count_head, tiles, num_splits, lse,
    sinks, temperature, noise,
    demoted_counts, demoted_row, demoted_head, first_demoted,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UPDATE_MASS: tl.constexpr, DEMOTED_PAGE_BLOCKS: tl.constexpr,
    SINKS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Combine the splits of ROWS rows of a tile into their output; with UPDATE_MASS also into lse, in base 2.

    With DEMOTED_PAGE_BLOCKS, the blocks of a page of demoted tokens, splits from `first_demoted` on are theirs.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    row, first, tokens = tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS >= tokens * R:
        return
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    exists, s = find_splits(counts + row * count_row + g * count_head, S // N)
    exists = valid[:, None] & exists
    at = ((j * G + g) * num_splits + s) * width + m[:, None]
    high, sums, factor = load_sums(split_max, split_sum, at, exists)
    e = tl.arange(0, VP)
    parts = load_outputs(split_out, at, exists, e, V)
    total = tl.sum(sums * factor, 1)
    out = tl.sum(parts * factor[:, :, None], 1)
    if DEMOTED_PAGE_BLOCKS:
        more_exist, s = find_splits(demoted_counts + row * demoted_row + g * demoted_head, DEMOTED_PAGE_BLOCKS)
        more_exist = valid[:, None] & more_exist
        more_at = ((j * G + g) * num_splits + first_demoted + s) * width + m[:, None]
        more_high, sums, factor = load_sums(split_max, split_sum, more_at, more_exist)
        parts = load_outputs(split_out, more_at, more_exist, e, V)
        high, total, a, b = rescale_sums(high, total, more_high, tl.sum(sums * factor, 1))
        out = out * a[:, None] + tl.sum(parts * factor[:, :, None], 1) * b[:, None]
    if SINKS:
        sink = tl.load(sinks + h, mask=valid, other=0.0) * LOG2E
        total = add_sink(high, total, sink)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    at_row = (t * G * R + h).to(tl.int64)
    tl.store(o + at_row[:, None] * V + e[None, :], out.to(o.dtype.element_ty), mask=valid[:, None] & (e < V)[None, :])
    if UPDATE_MASS:
        z_at = tl.num_programs(0) * G * num_splits * width
        high, sums, factor = load_sums(split_max, split_sum, z_at + at, exists)
        total = tl.sum(sums * factor, 1)
        if DEMOTED_PAGE_BLOCKS:
            more_high, sums, factor = load_sums(split_max, split_sum, z_at + more_at, more_exist)
            high, total, a, b = rescale_sums(high, total, more_high, tl.sum(sums * factor, 1))
        if SINKS:
            sink += mean_noise(tl.load(noise + tl.load(tiles + 6 * j)), NOISE)
            total = add_sink(high, total, sink / tl.load(temperature + t, mask=valid, other=1.0))
        tl.store(lse + at_row, high + safe_log2(total), mask=valid)
