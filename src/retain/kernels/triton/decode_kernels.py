"""The kernel of decode attention: a tile of few query rows attends to one split of the slots of one kv head.

A tile has all fresh tokens of one request, and the query heads that share a kv head: row m is token m // R, head m % R.
So K and V are read once for all of them. Splits are computed in parallel; merge_kernels.py combines them (split-K). A
table is split by its own length alone, so that a token's bits do not depend on the other requests. Scores are in base
2. Blocks of N slots need not divide a page: the page of each slot is looked up.

Demoted tokens have tables and pages of their own. Their splits follow those of the other tokens, and are merged with
them.

With masses, the weights of the softmax are stored as they are, relative to the maximum so far (PLAIN). Where noise or a
temperature changes them, the maximum of the changed scores is not looked for: no noise exceeds NOISE_BOUND.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.noise import LOG2E, PLAIN, add_noise, draws_noise, noise_key
from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.quantized_loads import (
    find_block,
    from_8bit,
    load_nibbles,
    load_paired_scales,
    load_vectors,
    low_columns,
)
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores, finite_or_zero

MAX_SPLITS = tl.constexpr(64)  # splits of a table, at most
NOISE_BOUND = tl.constexpr(26.0)  # in base 2: Gumbel noise of 23 bits is below 24, Gaussian below 10
# V of 8 bits meets weights in float16. Their products with scales are this much larger, so that small ones keep bits.
INT8_UNIT = tl.constexpr(256.0)


@triton.jit
def split_blocks(slots, N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Return the blocks of a table of so many slots, and the blocks in each of its splits."""
    blocks = (slots + N - 1) // N
    return blocks, tl.maximum(MIN_BLOCKS, (blocks + MAX_SPLITS - 1) // MAX_SPLITS)


@triton.jit
def unit_rows(x):
    """Return rows [M, D] divided by their largest numbers, and these [M]. float16 has a small range."""
    largest = tl.max(tl.abs(x), 1)
    largest = tl.where(largest == 0.0, 1.0, largest)
    return x / largest[:, None], largest


@triton.jit(
    do_not_specialize=[
        *TABLE_ADDRESSES, "split_max", "split_sum", "layer", "width", "num_splits", "max_slots", "num_blocks",
    ]
)  # fmt: skip
def attention_decode(
    q, q_token, q_head, split_max, split_sum, split_out, width, num_splits,  # splits [J, G, splits, width (, V)]
    k, v, k_scales, v_scales, k_words, v_words, pos,
    pages, page_row, page_head, counts, count_row, count_head, windows, window_row, dense,
    tiles, q_pos, slopes, factor, softcap,
    weights, temperature, noise, seed, redraw_noise, layer,
    split_weights, block_max, max_slots, num_blocks,  # with UPDATE_MASS: [t, H, max_slots], [t, H, num_blocks]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_BLOCKS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, DENSE: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, PRECISION: tl.constexpr,
    UPDATE_MASS: tl.constexpr, NOISE: tl.constexpr, ONE_TOKEN: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    K_HALVES: tl.constexpr, V_HALVES: tl.constexpr,
):  # fmt: skip
    """Compute one split of the slots for one decode tile and one kv head.

    K_HALVES and V_HALVES: numbers of 4 bits are used as two halves, of low and of high nibbles. See quantized_loads.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    )  # fmt: skip
    count = tl.load(counts + row * count_row + g * count_head) * S
    blocks, split = split_blocks(count, N, MIN_BLOCKS)
    begin = tl.program_id(2) * split
    end = tl.minimum(begin + split, blocks)
    if (tokens == 0) | (begin >= end):
        return
    m = tl.arange(0, M)
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    at_q = q + t.to(tl.int64)[:, None] * q_token + h[:, None] * q_head
    score_factor = factor + tl.zeros((M,), tl.float32)  # of products
    if K_HALVES:
        low = low_columns(D, K_GROUP)
        q_low = tl.load(at_q + low[None, :], mask=valid[:, None], other=0.0).to(K_DOT)
        q_high = tl.load(at_q + low[None, :] + K_GROUP // 2, mask=valid[:, None], other=0.0).to(K_DOT)
    else:
        rows = tl.load(at_q + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        if QUANTIZED and K_GROUP == 0:
            rows, largest = unit_rows(rows.to(tl.float32))
            score_factor *= largest
        rows = rows.to(K_DOT)
    p = tl.load(q_pos + t, mask=valid, other=-1)  # padding rows see nothing
    window = tl.load(windows + row * window_row)
    slope = tl.load(slopes + h, mask=valid, other=0.0) * LOG2E if ALIBI else p
    is_dense = window < 0  # false, as a tensor
    if DENSE:
        is_dense = (window == NO_WINDOW) & (tl.load(dense + row) != 0)
        # No slot behind the newest query is visible. A maximum of p under a condition was wrong on an H200 in tiles of
        # 32 rows, where it is one instruction (docs/log/gpu.md); the last token is the newest.
        if not UPDATE_MASS:
            newest = tl.load(q_pos + first + tokens - 1)
            end = tl.where(is_dense, tl.minimum(end, (newest + N) // N), end)
    if UPDATE_MASS:
        scored = (window == NO_WINDOW) & (tl.max(tl.load(weights + t, mask=valid, other=0.0), 0) != 0.0)
        at_row = ((tl.load(tiles + 6 * j + 5) + m // R) * G * R + h).to(tl.int64)
        if NOISE != PLAIN:
            kind = tl.load(noise + b)
            drawn_at = tl.load(q_pos + first + tl.zeros((1,), tl.int32)) if ONE_TOKEN else p
            keys = noise_key(tl.load(seed + b), layer, g, tl.where(tl.load(redraw_noise + b) == 1, drawn_at, -1))
            inverse_temperature = 1.0 / tl.load(temperature + t, mask=valid, other=1.0)
            # What is not changed has the same bits as beside requests that are not changed.
            is_changed = draws_noise(kind) | (inverse_temperature != 1.0)
            z_sums = tl.zeros((M, N), tl.float32)
    row_max = tl.full((M,), float("-inf"), tl.float32)
    sums = tl.zeros((M, N), tl.float32)  # summed over the columns once, behind the loop
    if V_HALVES:
        acc_low, acc_high = tl.zeros((M, V // 2), tl.float32), tl.zeros((M, V // 2), tl.float32)
    else:
        acc = tl.zeros((M, VP), tl.float32)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    n, even = tl.arange(0, N), 2 * tl.arange(0, N // 2)
    for i in range(begin, end):
        slot = i * N + n
        page, place = find_block(table, i, n, count // S - 1, S, N)
        even_page, even_place = find_block(table, i, even, count // S - 1, S, N)
        exists = n < N if S % N == 0 else slot < count
        even_exists = even < N if S % N == 0 else i * N + even < count
        loaded = tl.load(pos + page * S + place, mask=exists & (n < tl.where(is_dense, 0, N)), other=-1)
        slot_pos = tl.where(is_dense, slot, loaded)
        if K_HALVES:
            keys_low, keys_high = load_nibbles(
                k, k_words, page, place, exists, even_page, even_place, even_exists, S, D, K_PAGE, K_GROUP, K_DOT
            )
            x = tl.dot(q_low, tl.trans(keys_low), input_precision=PRECISION)
            x = tl.dot(q_high, tl.trans(keys_high), x, input_precision=PRECISION)
        else:
            if K_GROUP:
                keys_t = load_vectors(
                    k,
                    k_scales,
                    page[None, :],
                    place[None, :],
                    d[:, None],
                    exists[None, :],
                    S,
                    D,
                    DP,
                    K_PAGE,
                    K_GROUP,
                    False,
                    K_DOT,
                )
            else:
                at_k = k + (page * K_PAGE + place * D)[None, :] + d[:, None]
                keys_t = tl.load(at_k, mask=(d < D)[:, None] & exists[None, :], other=0)  # [DP, N]
                if QUANTIZED:
                    key_scales = load_paired_scales(k_words, even_page, even_place, even_exists, S, D, K_PAGE)
                    keys_t = from_8bit(keys_t, K_DOT, True)
            x = tl.dot(rows, keys_t.to(K_DOT), input_precision=PRECISION)
            if QUANTIZED and K_GROUP == 0:
                x *= key_scales[None, :]
        # Rounded once, here: as part of the exponent it would make weights of 1 inexact.
        x *= score_factor[:, None]
        if SOFTCAP:
            x = cap_scores(x, softcap)
        if ALIBI:
            x += slope[:, None] * (slot_pos[None, :] - p[:, None]).to(tl.float32)
        seen = (slot_pos >= 0)[None, :] & (slot_pos[None, :] <= p[:, None]) & (p[:, None] - slot_pos[None, :] < window)
        x = tl.where(seen, x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        high = finite_or_zero(new_max)
        w = tl.exp2(x - high[:, None])
        rescale = tl.exp2(row_max - high)
        sums = sums * rescale[:, None] + w
        if V_HALVES:
            values_low, values_high = load_nibbles(
                v, v_words, page, place, exists, even_page, even_place, even_exists, S, V, V_PAGE, V_GROUP, V_DOT
            )
            acc_low = tl.dot(w.to(V_DOT), values_low, acc_low * rescale[:, None], input_precision=PRECISION)
            acc_high = tl.dot(w.to(V_DOT), values_high, acc_high * rescale[:, None], input_precision=PRECISION)
        else:
            value_weights = w
            if V_GROUP:
                values = load_vectors(
                    v,
                    v_scales,
                    page[:, None],
                    place[:, None],
                    e[None, :],
                    exists[:, None],
                    S,
                    V,
                    VP,
                    V_PAGE,
                    V_GROUP,
                    False,
                    V_DOT,
                )
            else:
                at_v = v + (page * V_PAGE + place * V)[:, None] + e[None, :]
                values = tl.load(at_v, mask=(e < V)[None, :] & exists[:, None], other=0)  # [N, VP]
                if QUANTIZED:
                    scales = load_paired_scales(v_words, even_page, even_place, even_exists, S, V, V_PAGE)
                    value_weights = w * (scales * INT8_UNIT)[None, :]
                    values = from_8bit(values, V_DOT, False)
            rescaled = acc * rescale[:, None]
            acc = tl.dot(value_weights.to(V_DOT), values.to(V_DOT), rescaled, input_precision=PRECISION)
        if UPDATE_MASS:
            reference = new_max
            if NOISE != PLAIN:
                if ONE_TOKEN:  # its rows share the noise of a slot
                    changed = x + add_noise(tl.zeros((1, N), tl.float32), kind, keys, slot_pos, NOISE)
                else:
                    changed = add_noise(x, kind, keys, slot_pos, NOISE)
                reference = tl.where(is_changed, (new_max + NOISE_BOUND) * inverse_temperature, new_max)
                changed = changed * inverse_temperature[:, None] - finite_or_zero(reference)[:, None]
                w = tl.where(is_changed[:, None], tl.exp2(changed), w)
                z_rescale = tl.where(is_changed, tl.exp2((row_max - high) * inverse_temperature), rescale)
                z_sums = z_sums * z_rescale[:, None] + w
            # Rows of weight 0 are stored, too, but accumulate_mass does not read them.
            to = split_weights + at_row[:, None] * max_slots + slot[None, :]
            tl.store(to, w.to(split_weights.dtype.element_ty), mask=(valid & scored)[:, None] & exists[None, :])
            tl.store(block_max + at_row * num_blocks + i, reference, mask=valid & scored)
        row_max = new_max
    at = ((j * G + g) * num_splits + tl.program_id(2)) * width + m
    tl.store(split_max + at, row_max, mask=valid)
    tl.store(split_sum + at, tl.sum(sums, 1), mask=valid)
    to = split_out + at.to(tl.int64)[:, None] * V
    if V_HALVES:
        low = low_columns(V, V_GROUP)
        tl.store(to + low[None, :], acc_low, mask=valid[:, None])
        tl.store(to + low[None, :] + V_GROUP // 2, acc_high, mask=valid[:, None])
    else:
        if QUANTIZED and V_GROUP == 0:
            acc = acc / INT8_UNIT
        tl.store(to + e[None, :], acc, mask=valid[:, None] & (e < V)[None, :])
    if UPDATE_MASS and NOISE != PLAIN:  # the second half of the buffers
        z_at = tl.num_programs(0) * G * num_splits * width + at
        tl.store(
            split_max + z_at, tl.where(is_changed, (row_max + NOISE_BOUND) * inverse_temperature, row_max), mask=valid
        )
        tl.store(split_sum + z_at, tl.sum(z_sums, 1), mask=valid)
