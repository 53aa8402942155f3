"""The kernels of attention: tiles of query rows look at a stretch of a head's slots.

A row is a fresh token of one query head; those that share a kv head lie together (row m is token m // R, head m % R),
so K and V are read once for all of them. Few rows look in stretches, side by side, that `merge` brings together; many
go in tiles of rows, each through all slots. Scores are in base 2. How a table is cut into stretches depends on its own
length alone, so a request's bits do not depend on its company.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.api import NO_WINDOW
from retain.kernels.triton.noise import add_noise, noise_key

MAX_SPLITS = tl.constexpr(64)  # of a table, at most
MIN_SPLIT_BLOCKS = tl.constexpr(4)  # blocks of slots of a stretch, at least
_NO_WINDOW = tl.constexpr(NO_WINDOW)


@triton.jit
def split_size(blocks):
    """Blocks of each stretch of a table of so many."""
    return tl.maximum(MIN_SPLIT_BLOCKS, (blocks + MAX_SPLITS - 1) // MAX_SPLITS)


@triton.jit
def load_positions(pos, page, at, i, dense, N: tl.constexpr, S: tl.constexpr):
    """Those of N slots from place `at` of a page on, block i of its table. Dense: they are the places themselves."""
    n = tl.arange(0, N)
    there = tl.load(pos + page * S + at + n, mask=n < tl.where(dense, 0, N), other=-1)
    return tl.where(dense, i * N + n, there)


@triton.jit
def compute_scores(q, keys, pos, q_pos, slopes, factor, window, sinks, ALIBI: tl.constexpr, PRECISION: tl.constexpr):
    """Of rows [M] at slots [N], in base 2; -inf where a row does not see a slot. q [M, D], keys [D, N]."""
    p, s = q_pos[:, None], pos[None, :]
    x = tl.dot(q, keys, input_precision=PRECISION) * factor
    if ALIBI:
        x += slopes[:, None] * (s - p).to(tl.float32)
    seen = (s >= 0) & (s <= p) & ((p - s < window) | (s < sinks))
    return tl.where(seen, x, float("-inf"))


@triton.jit
def finite_or_zero(x):
    """What may be subtracted from scores below `top`, which may be -inf."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def safe_log2(total):
    """Of a sum; where there was nothing to sum, whatever is added to the -inf of its largest."""
    return tl.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=["layer"])
def attention_fwd(
    q, q_token, q_head, o, tops, sums, parts, width,  # o [T, H, D]; or [J, G, stretches, width (D for parts)]
    k, v, pos, pages, page_row, page_head, counts, count_row, count_head, windows, window_row, sinks, sink_row, dense,
    tiles, q_pos, slopes, factor, num_splits,
    weights, tau, noise, seed, redraw_noise, layer, lse, split_weights, tile_max, places,  # observed: lse [T, H], left [t, H, places]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, ALIBI: tl.constexpr, DENSE: tl.constexpr,
    DOT: tl.constexpr, UPDATE_MASS: tl.constexpr, NOISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One job, one kv head, one stretch (SPLIT) or everything."""
    j, g = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens, m0 = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3),
        tl.load(tiles + 6 * j + 4),
    )  # fmt: skip
    if tokens == 0:
        return
    blocks = tl.load(counts + row * count_row + g * count_head) * (S // N)
    begin, end = 0, blocks
    if SPLIT:
        n = split_size(blocks)
        begin = tl.program_id(2) * n
        end = tl.minimum(begin + n, blocks)
        if begin >= end:
            return
    m = m0 + tl.arange(0, M)
    mine = m < tokens * R
    t, h = first + m // R, g * R + m % R
    d = tl.arange(0, DP)
    q = tl.load(
        q + t.to(tl.int64)[:, None] * q_token + h[:, None] * q_head + d[None, :],
        mask=mine[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(DOT)  # [M, DP]
    p = tl.load(q_pos + t, mask=mine, other=-1)  # who is nobody's sees nothing
    window, sink = tl.load(windows + row * window_row), tl.load(sinks + row * sink_row)
    slope = tl.load(slopes + h, mask=mine, other=0.0) * 1.4426950408889634 if ALIBI else p
    full = window < 0
    if DENSE:
        full = (window == _NO_WINDOW) & (tl.load(dense + row) != 0)
        if not UPDATE_MASS and full:  # behind the newest query there is nothing to see
            end = tl.minimum(end, (tl.max(p, 0) + N) // N)
    if UPDATE_MASS:
        asked = (window == _NO_WINDOW) & (tl.max(tl.load(weights + t, mask=mine, other=0.0), 0) != 0.0)
        kind = tl.load(noise + b)
        keys = noise_key(tl.load(seed + b), layer, g, tl.where(tl.load(redraw_noise + b) == 1, p, -1))
        by = 1.0 / tl.load(tau + t, mask=mine, other=1.0)
        z_top, z_sum = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    for i in range(begin, end):
        page, at = tl.load(table + i * N // S).to(tl.int64), i * N % S
        s = page * S + at + tl.arange(0, N)
        there = load_positions(pos, page, at, i, full, N, S)
        kt = tl.load(k + s[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0).to(DOT)  # [DP, N]
        x = compute_scores(q, kt, there, p, slope, factor, window, sink, ALIBI, PRECISION)
        higher = tl.maximum(top, tl.max(x, 1))
        w = tl.exp2(x - finite_or_zero(higher)[:, None])
        scale = tl.exp2(top - finite_or_zero(higher))
        total = total * scale + tl.sum(w, 1)
        vs = tl.load(v + s[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)  # [N, DP]
        acc = tl.dot(w.to(DOT), vs.to(DOT), acc * scale[:, None], input_precision=PRECISION)
        top = higher
        if UPDATE_MASS:  # noqa: SIM102 (one is the compiler's, the other the device's)
            if asked:  # a row whose weight is 0 leaves numbers too, that nobody reads
                z = add_noise(x, kind, keys, there, NOISE) * by[:, None]
                here = tl.max(z, 1)
                w = tl.exp2(z - finite_or_zero(here)[:, None])
                if SPLIT:
                    at_row = ((tl.load(tiles + 6 * j + 5) + m // R) * G * R + h).to(tl.int64)
                    to = split_weights + at_row[:, None] * places + i * N + tl.arange(0, N)[None, :]
                    tl.store(to, w.to(split_weights.dtype.element_ty), mask=mine[:, None])
                    tl.store(tile_max + at_row * (places // N) + i, here, mask=mine)
                up = tl.maximum(z_top, here)
                z_sum = z_sum * tl.exp2(z_top - finite_or_zero(up)) + tl.sum(w, 1) * tl.exp2(here - finite_or_zero(up))
                z_top = up
    if SPLIT:
        at = ((j * G + g) * num_splits + tl.program_id(2)) * width + tl.arange(0, M)
        tl.store(tops + at, top, mask=mine)
        tl.store(sums + at, total, mask=mine)
        tl.store(parts + at.to(tl.int64)[:, None] * D + d[None, :], acc, mask=mine[:, None] & (d < D)[None, :])
        if UPDATE_MASS:
            z_at = tl.num_programs(0) * G * num_splits * width + at  # behind those
            tl.store(tops + z_at, z_top, mask=mine)
            tl.store(sums + z_at, z_sum, mask=mine)
    else:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        where = t.to(tl.int64)[:, None] * G * R * D + h[:, None] * D + d[None, :]
        tl.store(o + where, out.to(o.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])
        if UPDATE_MASS:
            tl.store(lse + t * G * R + h, z_top + safe_log2(z_sum), mask=mine)


@triton.jit
def merge_splits(
    o, tops, sums, parts, width, counts, count_row, count_head, tiles, num_splits, lse,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, UPDATE_MASS: tl.constexpr,
):  # fmt: skip
    """The stretches of some rows of a job become their output; where it is observed, also log2 of the weights' sums."""
    j, g = tl.program_id(0), tl.program_id(1)
    row, first, tokens = tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(2) * ROWS >= tokens * R:
        return
    mine = m < tokens * R
    t, h = first + m // R, g * R + m % R
    blocks = tl.load(counts + row * count_row + g * count_head) * (S // N)
    n = split_size(blocks)
    s = tl.arange(0, MAX_SPLITS)[None, :]
    there = mine[:, None] & (s * n < blocks)
    at = ((j * G + g) * num_splits + s) * width + m[:, None]
    top = tl.load(tops + at, mask=there, other=float("-inf"))  # [ROWS, STRETCHES]
    total = tl.load(sums + at, mask=there, other=0.0)
    factor = tl.exp2(top - finite_or_zero(tl.max(top, 1))[:, None])
    d = tl.arange(0, DP)
    part = tl.load(
        parts + at.to(tl.int64)[:, :, None] * D + d[None, None, :],
        mask=there[:, :, None] & (d < D)[None, None, :],
        other=0.0,
    )
    weight = tl.sum(total * factor, 1)
    out = tl.sum(part * factor[:, :, None], 1) / tl.where(weight == 0.0, 1.0, weight)[:, None]
    at_row = (t * G * R + h).to(tl.int64)
    tl.store(o + at_row[:, None] * D + d[None, :], out.to(o.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])
    if UPDATE_MASS:
        z_at = tl.num_programs(0) * G * num_splits * width + at
        z_top = tl.load(tops + z_at, mask=there, other=float("-inf"))
        z_sum = tl.load(sums + z_at, mask=there, other=0.0)
        high = tl.max(z_top, 1)
        tl.store(
            lse + at_row, high + safe_log2(tl.sum(z_sum * tl.exp2(z_top - finite_or_zero(high)[:, None]), 1)), mask=mine
        )
