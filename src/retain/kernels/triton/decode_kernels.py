"""The kernel of decode attention: a tile of few query rows attends to one split of the slots of one kv head.

A tile has all fresh tokens of one request, and the query heads that share a kv head: row m is token m // R, head m % R.
So K and V are read once for all of them. Splits are computed in parallel; merge_kernels.py combines them (split-K). A
table is split by its own length alone, so that a token's bits do not depend on the other requests. Scores are in base
2. Blocks of N slots need not divide a page: the page of each slot is looked up.

Scores are [slots, rows] and outputs [numbers, rows]: a tile has few rows, and tensor cores multiply 16 x 8. K of int8
is not converted: queries are integers of 16 bits, multiplied as two of 8. V of 8 bits and K of fp8 are pairs of
numbers, whose even and odd ones have products of their own.

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
    even_numbers,
    find_block,
    find_pages,
    load_nibbles,
    load_paired_scales,
    load_vectors,
    low_columns,
    odd_numbers,
    slot_offsets,
)
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores, finite_or_zero

MAX_SPLITS = tl.constexpr(64)  # splits of a table, at most
NOISE_BOUND = tl.constexpr(26.0)  # in base 2: Gumbel noise of 23 bits is below 24, Gaussian below 10
# V of 8 bits meets weights in float16. Their products with scales are this much larger, so that small ones keep bits.
UNIT_8BIT = tl.constexpr(256.0)


@triton.jit
def split_blocks(slots, N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Return the blocks of a table of so many slots, and the blocks in each of its splits."""
    blocks = (slots + N - 1) // N
    return blocks, tl.maximum(MIN_BLOCKS, (blocks + MAX_SPLITS - 1) // MAX_SPLITS)


@triton.jit
def to_int16(x):
    """Return float32 rows [D, M] as integers of 16 bits times units [M]: the high bytes, the low bytes, and the units.

    An integer is 256 times its high byte plus its low byte, both int8.
    """
    unit = tl.max(tl.abs(x), 0)
    unit = tl.where(unit == 0.0, 1.0, unit) / 32512.0  # 127 * 256
    integers = tl.floor(x / unit[None, :] + 0.5).to(tl.int32)
    high = (integers + 128) >> 8
    nan_or_zero = 0.0 * tl.sum(x, 0)  # no integer is NaN
    return high.to(tl.int8), (integers - 256 * high).to(tl.int8), unit + nan_or_zero


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
    """Compute splits of the slots, one after another, for one decode tile and one kv head.

    K_HALVES and V_HALVES: numbers of 4 bits are used as two halves, of low and of high nibbles. See quantized_loads.
    """
    K_INTEGERS: tl.constexpr = k.dtype.element_ty == tl.int8
    K_PAIRS: tl.constexpr = k.dtype.element_ty == tl.uint16
    V_PAIRS: tl.constexpr = QUANTIZED and V_GROUP == 0
    j, g = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    )  # fmt: skip
    count = tl.load(counts + row * count_row + g * count_head) * S
    blocks, split = split_blocks(count, N, MIN_BLOCKS)
    splits = tl.cdiv(blocks, split)
    splits_here = tl.cdiv(splits, tl.num_programs(2))
    first_split = tl.program_id(2) * splits_here
    if (tokens == 0) | (first_split >= splits):
        return
    m = tl.arange(0, M)
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    d2, e2 = tl.arange(0, DP // 2), tl.arange(0, VP // 2)  # of pairs
    at_q = q + t.to(tl.int64)[None, :] * q_token + h[None, :] * q_head
    score_factor = factor + tl.zeros((M,), tl.float32)  # of products
    if K_HALVES:
        low = low_columns(D, K_GROUP)
        q_low = tl.load(at_q + low[:, None], mask=valid[None, :], other=0.0).to(K_DOT)
        q_high = tl.load(at_q + low[:, None] + K_GROUP // 2, mask=valid[None, :], other=0.0).to(K_DOT)
    elif K_PAIRS:
        of_row = (d2 < D // 2)[:, None] & valid[None, :]
        q_even = tl.load(at_q + 2 * d2[:, None], mask=of_row, other=0.0).to(tl.float32)
        q_odd = tl.load(at_q + 2 * d2[:, None] + 1, mask=of_row, other=0.0).to(tl.float32)
        # Rows are divided by their largest numbers, because float16 has a small range.
        unit = tl.maximum(tl.max(tl.abs(q_even), 0), tl.max(tl.abs(q_odd), 0))
        unit = tl.where(unit == 0.0, 1.0, unit)
        q_even, q_odd = (q_even / unit[None, :]).to(K_DOT), (q_odd / unit[None, :]).to(K_DOT)
        score_factor *= unit
    else:
        queries = tl.load(at_q + d[:, None], mask=(d < D)[:, None] & valid[None, :], other=0.0)
        if K_INTEGERS:
            q_high, q_low, unit = to_int16(queries.to(tl.float32))
            score_factor *= unit
        else:
            queries = queries.to(K_DOT)
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
            blocks = tl.where(is_dense, tl.minimum(blocks, (newest + N) // N), blocks)
    if UPDATE_MASS:
        scored = (window == NO_WINDOW) & (tl.max(tl.load(weights + t, mask=valid, other=0.0), 0) != 0.0)
        at_row = ((tl.load(tiles + 6 * j + 5) + m // R) * G * R + h).to(tl.int64)
        if NOISE != PLAIN:
            kind = tl.load(noise + b)
            # Rows of one token share the noise of a slot.
            drawn_at = tl.load(q_pos + first + tl.zeros((1,), tl.int32)) if ONE_TOKEN else p
            drawn_at = tl.where(tl.load(redraw_noise + b) == 1, drawn_at, -1)
            noise_keys = noise_key(tl.load(seed + b), layer, g, drawn_at)[None, :]
            inverse_temperature = 1.0 / tl.load(temperature + t, mask=valid, other=1.0)
            # What is not changed has the same bits as beside requests that are not changed.
            is_changed = draws_noise(kind) | (inverse_temperature != 1.0)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    n = tl.arange(0, N)
    for part in range(first_split, tl.minimum(first_split + splits_here, splits)):
        row_max = tl.full((M,), float("-inf"), tl.float32)
        sums = tl.zeros((N, M), tl.float32)  # summed over the slots once, behind the loop
        if V_HALVES:
            acc_low, acc_high = tl.zeros((V // 2, M), tl.float32), tl.zeros((V // 2, M), tl.float32)
        elif V_PAIRS:
            acc_even, acc_odd = tl.zeros((VP // 2, M), tl.float32), tl.zeros((VP // 2, M), tl.float32)
        else:
            acc = tl.zeros((VP, M), tl.float32)
        if UPDATE_MASS and NOISE != PLAIN:
            z_sums = tl.zeros((N, M), tl.float32)
        for i in range(part * split, tl.minimum((part + 1) * split, blocks)):
            slot = i * N + n
            block = find_pages(table, i, n, count // S - 1, S, N)
            exists = n < N if S % N == 0 else slot < count
            loaded = tl.load(
                pos + slot_offsets(block, n, S, N, S, 1), mask=exists & (n < tl.where(is_dense, 0, N)), other=-1
            )
            slot_pos = tl.where(is_dense, slot, loaded)
            if K_HALVES:
                keys_low, keys_high = load_nibbles(k, k_words, block, n, exists, S, N, D, K_PAGE, K_GROUP, K_DOT)
                x = tl.dot(keys_low, q_low, input_precision=PRECISION)
                x = tl.dot(keys_high, q_high, x, input_precision=PRECISION)
            elif K_PAIRS:
                at_k = k + slot_offsets(block, n, S, N, K_PAGE // 2, D // 2)[:, None] + d2[None, :]
                pairs = tl.load(at_k, mask=exists[:, None] & (d2 < D // 2)[None, :], other=0)
                scales = load_paired_scales(k_words, block, n, exists, S, N, D, K_PAGE)
                x = tl.dot(even_numbers(pairs, K_DOT), q_even, input_precision=PRECISION)
                x = tl.dot(odd_numbers(pairs, K_DOT), q_odd, x, input_precision=PRECISION)
                x *= scales[:, None]
            else:
                if K_GROUP:
                    page, place = find_block(table, i, n, count // S - 1, S, N)
                    keys = load_vectors(
                        k, k_scales, page[:, None], place[:, None], d[None, :], exists[:, None],
                        S, D, DP, K_PAGE, K_GROUP, False, K_DOT,
                    )  # fmt: skip
                else:
                    at_k = k + slot_offsets(block, n, S, N, K_PAGE, D)[:, None] + d[None, :]
                    keys = tl.load(at_k, mask=exists[:, None] & (d < D)[None, :], other=0)
                if K_INTEGERS:
                    scales = load_paired_scales(k_words, block, n, exists, S, N, D, K_PAGE)
                    x = 256.0 * tl.dot(keys, q_high).to(tl.float32) + tl.dot(keys, q_low).to(tl.float32)
                    x *= scales[:, None]
                else:
                    x = tl.dot(keys.to(K_DOT), queries, input_precision=PRECISION)
            # Rounded once, here: as part of the exponent it would make weights of 1 inexact.
            x *= score_factor[None, :]
            if SOFTCAP:
                x = cap_scores(x, softcap)
            if ALIBI:
                x += slope[None, :] * (slot_pos[:, None] - p[None, :]).to(tl.float32)
            seen = (
                (slot_pos >= 0)[:, None] & (slot_pos[:, None] <= p[None, :]) & (p[None, :] - slot_pos[:, None] < window)
            )
            x = tl.where(seen, x, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(x, 0))
            high = finite_or_zero(new_max)
            w = tl.exp2(x - high[None, :])
            rescale = tl.exp2(row_max - high)[None, :]
            sums = sums * rescale + w
            if V_HALVES:
                values_low, values_high = load_nibbles(v, v_words, block, n, exists, S, N, V, V_PAGE, V_GROUP, V_DOT)
                value_weights = w.to(V_DOT)
                acc_low = tl.dot(tl.trans(values_low), value_weights, acc_low * rescale, input_precision=PRECISION)
                acc_high = tl.dot(tl.trans(values_high), value_weights, acc_high * rescale, input_precision=PRECISION)
            elif V_PAIRS:
                at_v = v + slot_offsets(block, n, S, N, V_PAGE // 2, V // 2)[None, :] + e2[:, None]
                pairs = tl.load(at_v, mask=exists[None, :] & (e2 < V // 2)[:, None], other=0)
                scales = load_paired_scales(v_words, block, n, exists, S, N, V, V_PAGE)
                value_weights = (w * (scales * UNIT_8BIT)[:, None]).to(V_DOT)
                even, odd = even_numbers(pairs, V_DOT), odd_numbers(pairs, V_DOT)
                acc_even = tl.dot(even, value_weights, acc_even * rescale, input_precision=PRECISION)
                acc_odd = tl.dot(odd, value_weights, acc_odd * rescale, input_precision=PRECISION)
            else:
                if V_GROUP:
                    page, place = find_block(table, i, n, count // S - 1, S, N)
                    values = load_vectors(
                        v, v_scales, page[None, :], place[None, :], e[:, None], exists[None, :],
                        S, V, VP, V_PAGE, V_GROUP, False, V_DOT,
                    )  # fmt: skip
                else:
                    at_v = v + slot_offsets(block, n, S, N, V_PAGE, V)[None, :] + e[:, None]
                    values = tl.load(at_v, mask=exists[None, :] & (e < V)[:, None], other=0).to(V_DOT)
                acc = tl.dot(values, w.to(V_DOT), acc * rescale, input_precision=PRECISION)
            if UPDATE_MASS:
                reference = new_max
                if NOISE != PLAIN:
                    changed = add_noise(x, kind, noise_keys, slot_pos[:, None], NOISE)
                    reference = tl.where(is_changed, (new_max + NOISE_BOUND) * inverse_temperature, new_max)
                    changed = changed * inverse_temperature[None, :] - finite_or_zero(reference)[None, :]
                    w = tl.where(is_changed[None, :], tl.exp2(changed), w)
                    z_rescale = tl.exp2((row_max - high) * inverse_temperature)[None, :]
                    z_sums = z_sums * tl.where(is_changed[None, :], z_rescale, rescale) + w
                # Rows of weight 0 are stored, too, but accumulate_mass does not read them.
                to = split_weights + at_row[None, :] * max_slots + slot[:, None]
                tl.store(to, w.to(split_weights.dtype.element_ty), mask=exists[:, None] & (valid & scored)[None, :])
                tl.store(block_max + at_row * num_blocks + i, reference, mask=valid & scored)
            row_max = new_max
        at = ((j * G + g) * num_splits + part) * width + m
        tl.store(split_max + at, row_max, mask=valid)
        tl.store(split_sum + at, tl.sum(sums, 0), mask=valid)
        to = split_out + at.to(tl.int64)[None, :] * V
        if V_HALVES:
            low = low_columns(V, V_GROUP)
            tl.store(to + low[:, None], acc_low, mask=valid[None, :])
            tl.store(to + low[:, None] + V_GROUP // 2, acc_high, mask=valid[None, :])
        elif V_PAIRS:
            of_row = (e2 < V // 2)[:, None] & valid[None, :]
            tl.store(to + 2 * e2[:, None], acc_even / UNIT_8BIT, mask=of_row)
            tl.store(to + 2 * e2[:, None] + 1, acc_odd / UNIT_8BIT, mask=of_row)
        else:
            tl.store(to + e[:, None], acc, mask=(e < V)[:, None] & valid[None, :])
        if UPDATE_MASS and NOISE != PLAIN:  # the second half of the buffers
            z_at = tl.num_programs(0) * G * num_splits * width + at
            z_max = tl.where(is_changed, (row_max + NOISE_BOUND) * inverse_temperature, row_max)
            tl.store(split_max + z_at, z_max, mask=valid)
            tl.store(split_sum + z_at, tl.sum(z_sums, 0), mask=valid)
