"""The kernel that combines the splits of decode tiles: those of a table, of its demoted tokens, and the sink logits."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.decode_kernels import split_blocks
from retain.kernels.triton.noise import LOG2E, PLAIN, mean_noise
from retain.kernels.triton.softmax import finite_or_zero, safe_log2


@triton.jit
def find_splits(counts, s, S: tl.constexpr, N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Return which of the splits s a table has."""
    blocks, split = split_blocks(tl.load(counts) * S, N, MIN_BLOCKS)
    return (s >= 0) & (s * split < blocks)


@triton.jit
def load_sums(split_max, split_sum, at, exists):
    """Return the maxima [ROWS] of rows, the sums of their splits together, and the splits' factors [ROWS, SPLITS]."""
    maxima = tl.load(split_max + at, mask=exists, other=float("-inf"))
    sums = tl.load(split_sum + at, mask=exists, other=0.0)
    high = tl.max(maxima, 1)
    factor = tl.exp2(maxima - finite_or_zero(high)[:, None])
    return high, tl.sum(sums * factor, 1), factor


@triton.jit
def add_sink(high, total, sink):
    """Add a sink logit in base 2 to the sum of a row's splits; the sum of a row that sees nothing stays."""
    return total + tl.where(high > float("-inf"), tl.exp2(sink - finite_or_zero(high)), 0.0)


@triton.jit(do_not_specialize=["counts", "demoted_counts", "width", "num_splits", "first_demoted"])
def merge_splits(
    o, split_max, split_sum, split_out, width, counts, count_row, count_head, tiles, num_splits, lse,
    sinks, temperature, noise,
    demoted_counts, demoted_row, demoted_head, first_demoted,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    N: tl.constexpr, MIN_BLOCKS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, UPDATE_MASS: tl.constexpr,
    DEMOTED_S: tl.constexpr, DEMOTED_N: tl.constexpr, DEMOTED_MIN_BLOCKS: tl.constexpr,
    SINKS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Combine the splits of ROWS rows of a tile into their output; with UPDATE_MASS also into lse, in base 2.

    SPLITS is at least `num_splits`. With DEMOTED_S, the slots of a page of demoted tokens, splits from `first_demoted`
    on are theirs.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    row, first, tokens = tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS >= tokens * R:
        return
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    s = tl.arange(0, SPLITS)[None, :]
    exists = find_splits(counts + row * count_row + g * count_head, s, S, N, MIN_BLOCKS)
    if DEMOTED_S:
        at_count = demoted_counts + row * demoted_row + g * demoted_head
        demoted = find_splits(at_count, s - first_demoted, DEMOTED_S, DEMOTED_N, DEMOTED_MIN_BLOCKS)
        exists = (exists & (s < first_demoted)) | demoted
    exists &= valid[:, None]
    at = ((j * G + g) * num_splits + s) * width + m[:, None]
    high, total, factor = load_sums(split_max, split_sum, at, exists)
    e = tl.arange(0, VP)
    parts = tl.load(
        split_out + at.to(tl.int64)[:, :, None] * V + e[None, None, :],
        mask=exists[:, :, None] & (e < V)[None, None, :],
        other=0.0,
    )
    if SINKS:
        sink = tl.load(sinks + h, mask=valid, other=0.0) * LOG2E
        total = add_sink(high, total, sink)
    out = tl.sum(parts * factor[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    at_row = (t * G * R + h).to(tl.int64)
    tl.store(o + at_row[:, None] * V + e[None, :], out.to(o.dtype.element_ty), mask=valid[:, None] & (e < V)[None, :])
    if UPDATE_MASS:
        if NOISE != PLAIN:
            z_at = tl.num_programs(0) * G * num_splits * width + at
            high, total, factor = load_sums(split_max, split_sum, z_at, exists)
            if SINKS:
                sink += mean_noise(tl.load(noise + tl.load(tiles + 6 * j)), NOISE)
                total = add_sink(high, total, sink / tl.load(temperature + t, mask=valid, other=1.0))
        tl.store(lse + at_row, high + safe_log2(total), mask=valid)
