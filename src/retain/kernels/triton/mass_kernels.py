"""Mass kernels: they add what a step's queries leave on the slots, after the attention kernels have run.

Decode tiles have stored their attention weights, each block's relative to a maximum. `accumulate_mass` normalizes them
by the `lse` of `merge_splits` and adds them up, so no score is computed twice. The weights of prefill tiles would fill
the memory; `recompute_mass` computes their scores again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.attention_kernels import _NO_WINDOW, compute_scores, load_keys, load_positions
from retain.kernels.triton.noise import LOG2E, add_noise, noise_key
from retain.kernels.triton.quantized_loads import find_slots


@triton.jit(do_not_specialize=["max_slots", "num_blocks"])
def accumulate_mass(
    mass, pages, page_row, page_head, counts, count_row, count_head, windows, window_row, tiles,
    weights, decay, lse, split_weights, block_max, max_slots, num_blocks,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, N: tl.constexpr, C: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the stored weights [t, H, max_slots] of one tile and kv head to the mass of BLOCKS blocks of N slots."""
    j, g = tl.program_id(0), tl.program_id(1)
    b, row = tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1)
    first, tokens, first_stored = tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3), tl.load(tiles + 6 * j + 5)
    count = tl.load(counts + row * count_row + g * count_head) * S
    i = tl.program_id(2) * BLOCKS + tl.arange(0, BLOCKS)
    if (tokens == 0) | (tl.program_id(2) * BLOCKS * N >= count):
        return
    fades, scored = tl.load(decay + b), 0.0
    for k in range(tokens):
        scored += tl.load(weights + first + k)
    if (tl.load(windows + row * window_row) != _NO_WINDOW) | ((fades == 1.0) & (scored == 0.0)):
        return
    table = pages + row.to(tl.int64) * page_row + g * page_head
    slot = i[:, None] * N + tl.arange(0, N)[None, :]
    if S % N == 0:  # a block is in one page
        page, _, exists = find_slots(table, i[:, None] * N, count, S)
        place = slot % S
    else:
        page, place, exists = find_slots(table, slot, count, S)
    at = mass + page * (C * S) + place
    total = fades * tl.load(at, mask=exists, other=0.0) if C == 1 else tl.zeros((BLOCKS, N), tl.float32)
    for r in tl.static_range(R):
        if C > 1:
            total = fades * tl.load(at + r * S, mask=exists, other=0.0)
        for k in range(tokens):
            at_row = ((first_stored + k) * G * R + g * R + r).to(tl.int64)
            weight, log_sum = tl.load(weights + first + k), tl.load(lse + (first + k) * G * R + g * R + r)
            adds = (weight != 0.0) & (log_sum > float("-inf"))
            stored = exists & adds  # what no query has stored is read nowhere
            w = tl.load(split_weights + at_row * max_slots + slot, mask=stored, other=0.0).to(tl.float32)
            high = tl.load(block_max + at_row * num_blocks + i, mask=(i * N < count) & adds, other=float("-inf"))
            total += w * (weight * tl.exp2(high - tl.where(adds, log_sum, 0.0)))[:, None]
        if C > 1:
            tl.store(at + r * S, total, mask=exists)
    if C == 1:
        tl.store(at, total, mask=exists)


@triton.jit(do_not_specialize=["layer"])
def recompute_mass(
    q, q_token, q_head, k, k_scales, pos, mass, pages, page_row, page_head, counts, count_row, count_head,
    windows, window_row, dense, tiles, q_pos, slopes, scale, softcap,
    weights, temperature, decay, noise, seed, redraw_noise, layer, lse,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, DENSE: tl.constexpr,
    DOT: tl.constexpr, NOISE: tl.constexpr, PRECISION: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
):  # fmt: skip
    """Add the weights of all fresh tokens of one request to the mass of a block of slots, query head by query head."""
    j, g, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, row = tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1)
    first, tokens = tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    window = tl.load(windows + row * window_row)
    if i * N >= tl.load(counts + row * count_row + g * count_head) * S or window != _NO_WINDOW:
        return
    page = tl.load(pages + row.to(tl.int64) * page_row + g * page_head + i * N // S).to(tl.int64)
    is_dense = window < 0  # false, as a tensor
    if DENSE:
        is_dense = tl.load(dense + row) != 0
    place = i * N % S
    slot_pos = load_positions(pos, page, place, i, is_dense, N, S)
    d = tl.arange(0, DP)
    kt, factor = load_keys(k, k_scales, page, place, d, scale, N, S, D, DOT, K_PAGE, QUANTIZED, K_GROUP)
    kind, redraws, fades = tl.load(noise + b), tl.load(redraw_noise + b) == 1, tl.load(decay + b)
    at = mass + page * C * S + place + tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for r in range(R):
        h = g * R + r
        slope = tl.load(slopes + h) * LOG2E if ALIBI else 0.0
        for m0 in range(0, tokens, M):
            m = m0 + tl.arange(0, M)
            t, valid = first + m, m < tokens
            weight = tl.load(weights + t, mask=valid, other=0.0)
            if tl.max(weight, 0) != 0.0:
                rows = tl.load(
                    q + t.to(tl.int64)[:, None] * q_token + h * q_head + d[None, :],
                    mask=valid[:, None] & (d < D)[None, :],
                    other=0.0,
                ).to(DOT)  # [M, DP]
                p = tl.load(q_pos + t, mask=valid, other=-1)
                x = compute_scores(
                    rows,
                    kt,
                    slot_pos,
                    p,
                    slope + tl.zeros((M,), tl.float32),
                    factor,
                    softcap,
                    window,
                    ALIBI,
                    SOFTCAP,
                    PRECISION,
                )
                keys = noise_key(tl.load(seed + b), layer, g, tl.where(redraws, p, -1))
                z = add_noise(x, kind, keys, slot_pos, NOISE)
                z /= tl.load(temperature + t, mask=valid, other=1.0)[:, None]
                log_sum = tl.load(lse + t * G * R + h, mask=valid, other=float("-inf"))
                sees = log_sum > float("-inf")
                w = tl.exp2(z - tl.where(sees, log_sum, 0.0)[:, None]) * tl.where(sees, weight, 0.0)[:, None]
                total += tl.sum(w, 0)
        if C > 1:
            tl.store(at + r * S, fades * tl.load(at + r * S) + total)
            total = tl.zeros((N,), tl.float32)
    if C == 1:
        tl.store(at, fades * tl.load(at) + total)
