"""The kernels of masses: what a step's queries left on slots, added up.

Few rows have left their weights where they looked, relative to each block's largest; `deposit` adds them, by the sum
of all that `merge` found: nothing is computed twice. Of many rows weights would fill the memory: `recount` goes through
the slots' queries once more. What is not known here: what is attended to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.attention_kernels import _NO_WINDOW, compute_scores, load_positions
from retain.kernels.triton.noise import add_noise, noise_key


@triton.jit
def accumulate_mass(
    mass, pages, page_row, page_head, counts, count_row, count_head, windows, window_row, tiles,
    weights, decay, lse, split_weights, tile_max, places,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A block of slots of one job and kv head: mass [P, C, S] from left [t, H, places]."""
    j, g, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, row = tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1)
    first, tokens = tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    if tokens == 0 or i * N >= tl.load(counts + row * count_row + g * count_head) * S:
        return
    m = tl.arange(0, M)
    t, h = first + m // R, g * R + m % R
    weight, fades = tl.load(weights + t, mask=m < tokens * R, other=0.0), tl.load(decay + b)
    if tl.load(windows + row * window_row) != _NO_WINDOW or (fades == 1.0 and tl.max(weight, 0) == 0.0):
        return
    at_row = (t * G * R + h).to(tl.int64)
    sums = tl.load(lse + at_row, mask=weight != 0.0, other=float("-inf"))
    sees = sums > float("-inf")
    at_row = ((tl.load(tiles + 6 * j + 5) + m // R) * G * R + h).to(tl.int64)
    top = tl.load(tile_max + at_row * (places // N) + i, mask=sees, other=float("-inf"))
    factor = weight * tl.exp2(top - tl.where(sees, sums, 0.0))
    w = tl.load(
        split_weights + at_row[:, None] * places + i * N + tl.arange(0, N)[None, :], mask=sees[:, None], other=0.0
    )
    w = w.to(tl.float32) * factor[:, None]
    page = tl.load(pages + row.to(tl.int64) * page_row + g * page_head + i * N // S).to(tl.int64)
    at = mass + page * C * S + i * N % S + tl.arange(0, N)
    for c in tl.static_range(C):
        mine = tl.where((m % R == c)[:, None], w, 0.0) if C > 1 else w
        tl.store(at + c * S, fades * tl.load(at + c * S) + tl.sum(mine, 0))


@triton.jit(do_not_specialize=["layer"])
def recompute_mass(
    q, q_token, q_head, k, pos, mass, pages, page_row, page_head, counts, count_row, count_head,
    windows, window_row, sinks, sink_row, dense, tiles, q_pos, slopes, scale,
    weights, tau, decay, noise, seed, redraw_noise, layer, lse,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, ALIBI: tl.constexpr, DENSE: tl.constexpr, DOT: tl.constexpr,
    NOISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of slots of one request and kv head, looked at by all of its fresh tokens, head by head."""
    j, g, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, row = tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1)
    first, tokens = tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    window, sink = tl.load(windows + row * window_row), tl.load(sinks + row * sink_row)
    if i * N >= tl.load(counts + row * count_row + g * count_head) * S or window != _NO_WINDOW:
        return
    page = tl.load(pages + row.to(tl.int64) * page_row + g * page_head + i * N // S).to(tl.int64)
    full = window < 0
    if DENSE:
        full = tl.load(dense + row) != 0
    there = load_positions(pos, page, i * N % S, i, full, N, S)
    d, n = tl.arange(0, DP), tl.arange(0, N)
    kt = tl.load(k + (page * S + i * N % S + n)[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0).to(DOT)
    kind, steps, fades = tl.load(noise + b), tl.load(redraw_noise + b) == 1, tl.load(decay + b)
    at = mass + page * C * S + i * N % S + n
    total = tl.zeros((N,), tl.float32)
    for r in range(R):
        h = g * R + r
        slope = tl.load(slopes + h) * 1.4426950408889634 if ALIBI else 0.0
        for m0 in range(0, tokens, M):
            m = m0 + tl.arange(0, M)
            t, mine = first + m, m < tokens
            weight = tl.load(weights + t, mask=mine, other=0.0)
            if tl.max(weight, 0) != 0.0:
                rows = tl.load(
                    q + t.to(tl.int64)[:, None] * q_token + h * q_head + d[None, :],
                    mask=mine[:, None] & (d < D)[None, :],
                    other=0.0,
                ).to(DOT)  # [M, DP]
                p = tl.load(q_pos + t, mask=mine, other=-1)
                x = compute_scores(
                    rows, kt, there, p, slope + tl.zeros((M,), tl.float32), scale, window, sink, ALIBI, PRECISION
                )
                keys = noise_key(tl.load(seed + b), layer, g, tl.where(steps, p, -1))
                z = add_noise(x, kind, keys, there, NOISE) / tl.load(tau + t, mask=mine, other=1.0)[:, None]
                sums = tl.load(lse + t * G * R + h, mask=mine, other=float("-inf"))
                sees = sums > float("-inf")
                w = tl.exp2(z - tl.where(sees, sums, 0.0)[:, None]) * tl.where(sees, weight, 0.0)[:, None]
                total += tl.sum(w, 0)
        if C > 1:
            tl.store(at + r * S, fades * tl.load(at + r * S) + total)
            total = tl.zeros((N,), tl.float32)
    if C == 1:
        tl.store(at, fades * tl.load(at) + total)
