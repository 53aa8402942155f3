"""The mass that prompts leave: the keys of a block of slots stay, and the queries of a request stream past them.

The weights of prefill tiles would fill the memory, so scores are computed again. A query of weight w adds
exp2(score - lse) * w to a slot; attention_prefill has left log2(w) - lse, which a product starts from. In dense tables
the tokens before a block see none of it and are left out, and those behind it need neither masks nor positions.

The columns of a product are TT tokens of each of HEADS query heads, which share noise. Tensor cores give a thread every
eighth column, and TT is mostly a multiple of 8: a thread that has a token of one head has it of the others, and draws
noise once. Tiles begin at positions that TT divides where a period of noise does, so that the compiler sees which
columns share a draw.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.noise import LOG2E, add_noise, draw_gumbel_factors, noise_key
from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.prefill_kernels import SCORES, WEIGHTS
from retain.kernels.triton.quantized_loads import find_block, load_slot_scales, load_vectors
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores


@triton.jit
def noise_draws(first_pos, t, TT: tl.constexpr, PERIOD: tl.constexpr):
    """Return the number of the draw of noise of tokens t of a tile, whose first position is first_pos."""
    if TT % PERIOD == 0 or PERIOD % TT == 0:
        return first_pos // PERIOD + t // PERIOD
    return (first_pos + t) // PERIOD


@triton.jit
def sum_weights(
    begin, end, total, keys, key_factor, slot_pos, base,
    q, q_token, q_head, log_weights, weights, temperature, q_pos, first, tokens, first_pos, first_head, T,
    slopes, factor, softcap, kind, seed, layer, g,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TT: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, CHANGE: tl.constexpr, NOISE: tl.constexpr, PERIOD: tl.constexpr,
    FOLDED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights of tokens `begin` to `end` of some query heads to the sums [N, HEADS * TT] of a block of slots.

    FOLDED: a factor makes exponents of products, so these start from log_weights. (Only loads that feed a product are
    asynchronous.) Noise is left out where it is a factor of a slot's sum. MASKED loads positions, and compares them.
    """
    column, d = tl.arange(0, HEADS * TT), tl.arange(0, DP)
    h = first_head + column // TT
    slope = tl.load(slopes + h) * LOG2E if ALIBI else h
    for t0 in range(begin, end, TT):
        t = t0 + column % TT
        there = (t >= 0) & (t < tokens)
        qt = tl.load(
            q + (first + t).to(tl.int64)[None, :] * q_token + h[None, :] * q_head + d[:, None],
            mask=there[None, :] & (d < D)[:, None],
            other=0.0,
        ).to(DOT)  # [DP, HEADS * TT]
        start = tl.load(log_weights + h * T + first + t, mask=there, other=float("-inf"))
        p = first_pos + t
        if MASKED:
            p = tl.load(q_pos + first + t, mask=there, other=-1)
        if FOLDED:
            start *= 1.0 / factor
            if ALIBI:
                start -= (slope / factor) * (p - base).to(tl.float32)
            z = tl.dot(keys, qt, tl.zeros_like(total) + start[None, :], input_precision=PRECISION) * factor
        else:
            z = tl.dot(keys, qt, input_precision=PRECISION) * key_factor[:, None]
            if SOFTCAP:
                z = cap_scores(z, softcap)
            if ALIBI:
                z -= (slope * (p - base).to(tl.float32))[None, :]
        if ALIBI:
            z += slope[None, :] * (slot_pos - base).to(tl.float32)[:, None]
        if CHANGE == SCORES:
            draws = tl.full((1,), -1, tl.int32)
            if PERIOD:
                draws = noise_draws(first_pos + t0, column % TT, TT, PERIOD)
            noise_keys = noise_key(seed, layer, g, draws)
            z = add_noise(z, kind, noise_keys[None, :], slot_pos[:, None], NOISE)
            z *= (1.0 / tl.load(temperature + first + t, mask=there, other=1.0))[None, :]
        if not FOLDED:
            z += start[None, :]
        w = tl.exp2(z)
        if MASKED:
            w = tl.where((slot_pos >= 0)[:, None] & (slot_pos[:, None] <= p[None, :]), w, 0.0)
        if CHANGE == WEIGHTS and PERIOD:
            draws = noise_draws(first_pos + t0, tl.arange(0, TT), TT, PERIOD)
            noise_keys = noise_key(seed, layer, g, draws)
            factors = draw_gumbel_factors(kind, noise_keys[None, :], slot_pos[:, None])  # [N, TT]
            w = tl.reshape(tl.reshape(w, (N, HEADS, TT)) * factors[:, None, :], (N, HEADS * TT))
        if CHANGE == SCORES:
            w = tl.where((tl.load(weights + first + t, mask=there, other=0.0) < 0.0)[None, :], -w, w)
        total += w
    return total


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, "layer", "T"])
def recompute_mass(
    q, q_token, q_head, k, k_scales, pos, mass, pages, page_row, page_head, counts, count_row, count_head,
    windows, window_row, dense, tiles, q_pos, slopes, factor, softcap,
    weights, temperature, decay, noise, seed, noise_period, layer, log_weights, T,  # log_weights [H, T]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
    TT: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    DENSE: tl.constexpr, DOT: tl.constexpr, CHANGE: tl.constexpr, NOISE: tl.constexpr, PERIOD: tl.constexpr,
    PRECISION: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
):  # fmt: skip
    """Add the weights of the scored tokens of one request to the mass of N slots of one kv head.

    The fresh tokens of a request have consecutive positions.
    """
    FOLDED: tl.constexpr = not (SOFTCAP or CHANGE == SCORES or (QUANTIZED and not K_GROUP))
    j, g, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, row, first, tokens = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    )  # fmt: skip
    count = tl.load(counts + row * count_row + g * count_head)
    fades = tl.load(decay + b)
    if i * N >= count * S or tl.load(windows + row * window_row) != NO_WINDOW or (tokens == 0 and fades == 1.0):
        return
    n, d = tl.arange(0, N), tl.arange(0, DP)
    page, place = find_block(pages + row.to(tl.int64) * page_row + g * page_head, i, n, count - 1, S, N)
    there = i * N + n < count * S
    is_dense = tokens < 0  # false, as a tensor
    if DENSE:
        is_dense = tl.load(dense + row) != 0
    loaded = tl.load(pos + page * S + place, mask=there & (is_dense == 0), other=-1)
    slot_pos = tl.where(is_dense, i * N + n, loaded)
    base = tl.max(slot_pos.to(tl.float32), 0).to(tl.int32)  # of integers it is wrong on Hopper: see decode_kernels.py
    keys = load_vectors(
        k, k_scales, page[:, None], place[:, None], d[None, :], there[:, None], S, D, DP, K_PAGE, K_GROUP, False, DOT
    )
    key_factor = factor + tl.zeros((N,), tl.float32)
    if QUANTIZED and not K_GROUP:
        key_factor *= load_slot_scales(k_scales, page, place, there, S, D, K_PAGE)
    first_pos = tl.load(q_pos + first, mask=tokens > 0, other=0)
    before = 0  # places of the first tile that have no token
    if PERIOD:
        before = first_pos % TT
    num_tiles = (tokens + before + TT - 1) // TT
    begin, diagonal = 0, num_tiles  # tiles of tokens before the block, and those that do not see all of it
    if DENSE:
        begin = tl.where(is_dense, tl.minimum((tl.maximum(i * N - first_pos, 0) + before) // TT, num_tiles), 0)
        unseen = tl.maximum(i * N + N - 1 - first_pos, 0) + before
        diagonal = tl.where(is_dense, tl.minimum((unseen + TT - 1) // TT, num_tiles), num_tiles)
    kind, seed_b = tl.load(noise + b), tl.load(seed + b)
    at, total = mass + page * C * S + place, tl.zeros((N, HEADS * TT), tl.float32)
    for r in range(0, R, HEADS):
        total = sum_weights(
            begin * TT - before, diagonal * TT - before, total, keys, key_factor, slot_pos, base,
            q, q_token, q_head, log_weights, weights, temperature, q_pos, first, tokens, first_pos, g * R + r, T,
            slopes, factor, softcap, kind, seed_b, layer, g,
            D, DP, N, TT, HEADS, True, ALIBI, SOFTCAP, CHANGE, NOISE, PERIOD, FOLDED, DOT, PRECISION,
        )  # fmt: skip
        if DENSE:
            total = sum_weights(
                diagonal * TT - before, num_tiles * TT - before, total, keys, key_factor, slot_pos, base,
                q, q_token, q_head, log_weights, weights, temperature, q_pos, first, tokens, first_pos, g * R + r, T,
                slopes, factor, softcap, kind, seed_b, layer, g,
                D, DP, N, TT, HEADS, False, ALIBI, SOFTCAP, CHANGE, NOISE, PERIOD, FOLDED, DOT, PRECISION,
            )  # fmt: skip
        if C > 1 or r == R - HEADS:
            added = tl.sum(tl.reshape(total, (N, HEADS, TT)), 2)
            if C == 1:
                added = tl.sum(added, 1)[:, None]
            if CHANGE == WEIGHTS and not PERIOD:
                key = noise_key(seed_b, layer, g, tl.full((1,), -1, tl.int32))
                added *= draw_gumbel_factors(kind, key, slot_pos)[:, None]
            columns = (r + tl.arange(0, HEADS)) * S if C > 1 else tl.zeros((1,), tl.int32)
            to = at[:, None] + columns[None, :]
            tl.store(to, fades * tl.load(to, mask=there[:, None], other=0.0) + added, mask=there[:, None])
            total = tl.zeros((N, HEADS * TT), tl.float32)
