"""The kernel of decode attention: a tile of few query rows attends to one split of the slots of one kv head.

A tile has all fresh tokens of one request, and the query heads that share a kv head: row m is token m // R, head m % R.
So K and V are read once for all of them. Splits are computed in parallel; merge_kernels.py combines them (split-K). A
table is split by its own length alone, so that a token's bits do not depend on the other requests. Scores are in base
2. Blocks of N slots need not divide a page: the page of each slot is looked up.

Slots are the rows (16) of a product of tensor cores, and query rows its columns (8), so that few query rows have little
padding: scores are [slots, rows], and outputs [numbers, rows]. K of int8 is not converted: queries are integers of 16
bits, multiplied as two int8, and sums are exact. V of 8 bits, K of fp8, and numbers of 4 bits are loaded as two parts
of a row, each with products of its own (K_PART, V_PART).

Demoted tokens have tables and pages of their own. Their splits follow those of the other tokens, and are merged with
them.

With masses, the weights of the softmax are stored as they are, relative to the maximum so far (PLAIN). Where noise or a
temperature changes them, the maximum of the changed scores is not looked for: no noise exceeds NOISE_BOUND.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.noise import LOG2E, PLAIN, add_noise, draws_noise, noise_draw, noise_key
from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.quantized_loads import (
    find_block,
    first_columns,
    load_nibbles,
    load_scales_async,
    load_vectors,
    locate_block,
    slot_offsets,
    unpack_bytes,
)
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores, finite_or_zero

MAX_SPLITS = tl.constexpr(64)  # splits of a table, at most
NOISE_BOUND = tl.constexpr(26.0)  # in base 2: Gumbel noise of 23 bits is below 24, Gaussian below 10
# V of 8 bits meets weights in float16. Their products with scales are this much larger, so that small ones keep bits.
WEIGHT_FACTOR = tl.constexpr(256.0)


@triton.jit
def split_blocks(slots, N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Return the blocks of a table of so many slots, the blocks in each of its splits, and its splits."""
    blocks = (slots + N - 1) // N
    blocks_per_split = tl.maximum(MIN_BLOCKS, (blocks + MAX_SPLITS - 1) // MAX_SPLITS)
    return blocks, blocks_per_split, tl.cdiv(blocks, blocks_per_split)


@triton.jit
def quantize_queries(x):
    """Quantize queries float32 [D, M] to 16 bits. Return their high and low bytes int8 [D, M], and scales float32 [M].

    A query is 256 times its high byte plus its low byte, times its scale. One that is not finite has the scale NaN.
    """
    scale = tl.max(tl.abs(x), 0)
    scale = tl.where(scale == 0.0, 1.0, scale) / 32512.0  # 127 * 256
    integers = tl.floor(x / scale[None, :] + 0.5).to(tl.int32)
    high_byte = (integers + 128) >> 8
    nan_or_zero = 0.0 * tl.sum(x, 0)
    return high_byte.to(tl.int8), (integers - 256 * high_byte).to(tl.int8), scale + nan_or_zero


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
    weights, temperature, noise, seed, noise_period, layer,
    split_weights, block_max, max_slots, num_blocks,  # with UPDATE_MASS: [t, H, max_slots], [t, H, num_blocks]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, MIN_BLOCKS: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, DENSE: tl.constexpr, K_DOT: tl.constexpr, V_DOT: tl.constexpr, PRECISION: tl.constexpr,
    UPDATE_MASS: tl.constexpr, NOISE: tl.constexpr, ONE_TOKEN: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    K_HALVES: tl.constexpr, V_HALVES: tl.constexpr,
):  # fmt: skip
    """Compute splits of the slots, one after another, for one decode tile and one kv head.

    K_HALVES and V_HALVES: rows of 4 bits are wide enough for two parts, of low and of high nibbles. Where k and v are
    pairs of numbers, see page_args.
    """
    K_INT8: tl.constexpr = k.dtype.element_ty == tl.int8
    K_PAIRS: tl.constexpr = k.dtype.element_ty == tl.uint16
    V_PAIRS: tl.constexpr = QUANTIZED and V_GROUP == 0
    # Of so many numbers the first half is in the first part, and the second half in the other. 0: there is one part.
    K_PART: tl.constexpr = 2 if K_PAIRS else K_GROUP if K_HALVES else 0
    V_PART: tl.constexpr = 2 if V_PAIRS else V_GROUP if V_HALVES else 0
    j, g = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    )  # fmt: skip
    count = tl.load(counts + row * count_row + g * count_head) * S
    blocks, blocks_per_split, splits = split_blocks(count, N, MIN_BLOCKS)
    splits_here = tl.cdiv(splits, tl.num_programs(2))
    first_split = tl.program_id(2) * splits_here
    if (tokens == 0) | (first_split >= splits):
        return
    m = tl.arange(0, M)
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    at_q = q + t.to(tl.int64)[None, :] * q_token + h[None, :] * q_head
    score_factor = factor + tl.zeros((M,), tl.float32)  # of products
    if K_PART:
        columns = first_columns(DP, K_PART)[:, None]
        in_row = (columns < D) & valid[None, :]
        q_first = tl.load(at_q + columns, mask=in_row, other=0.0)
        q_second = tl.load(at_q + columns + K_PART // 2, mask=in_row, other=0.0)
        if K_PAIRS:  # queries are divided by their largest numbers, because float16 has a small range
            q_first, q_second = q_first.to(tl.float32), q_second.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(q_first), 0), tl.max(tl.abs(q_second), 0))
            largest = tl.where(largest == 0.0, 1.0, largest)
            q_first, q_second = q_first / largest[None, :], q_second / largest[None, :]
            score_factor *= largest
        q_first, q_second = q_first.to(K_DOT), q_second.to(K_DOT)
    else:
        queries = tl.load(at_q + d[:, None], mask=(d < D)[:, None] & valid[None, :], other=0.0)
        if K_INT8:
            q_high_byte, q_low_byte, q_scale = quantize_queries(queries.to(tl.float32))
            score_factor *= q_scale
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
            draw = noise_draw(drawn_at, tl.load(noise_period + b))
            noise_keys = noise_key(tl.load(seed + b), layer, g, draw)[None, :]
            inverse_temperature = 1.0 / tl.load(temperature + t, mask=valid, other=1.0)
            # What is not changed has the same bits as beside requests that are not changed.
            is_changed = draws_noise(kind) | (inverse_temperature != 1.0)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    n = tl.arange(0, N)
    for split in range(first_split, tl.minimum(first_split + splits_here, splits)):
        row_max = tl.full((M,), float("-inf"), tl.float32)
        sums = tl.zeros((N, M), tl.float32)  # summed over the slots once, behind the loop
        if V_PART:
            acc_first, acc_second = tl.zeros((VP // 2, M), tl.float32), tl.zeros((VP // 2, M), tl.float32)
        else:
            acc = tl.zeros((VP, M), tl.float32)
        if UPDATE_MASS and NOISE != PLAIN:
            z_sums = tl.zeros((N, M), tl.float32)
        for i in range(split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, blocks)):
            slot = i * N + n
            location = locate_block(table, i, n, count // S - 1, S, N)
            exists = n < N if S % N == 0 else slot < count
            reads_pos = exists & (n < tl.where(is_dense, 0, N))  # no positions are loaded where the table is dense
            loaded = tl.load(pos + slot_offsets(location, n, S, N, S, 1), mask=reads_pos, other=-1)
            slot_pos = tl.where(is_dense, slot, loaded)
            if K_PART:
                if K_PAIRS:
                    c = tl.arange(0, DP // 2)
                    at_k = k + slot_offsets(location, n, S, N, K_PAGE // 2, D // 2)[:, None] + c[None, :]
                    pairs = tl.load(at_k, mask=exists[:, None] & (c < D // 2)[None, :], other=0)
                    keys_first, keys_second = unpack_bytes(pairs, False, K_DOT), unpack_bytes(pairs, True, K_DOT)
                else:
                    keys_first, keys_second = load_nibbles(
                        k, k_words, location, n, exists, S, N, D, K_PAGE, K_GROUP, K_DOT
                    )
                x = tl.dot(keys_first, q_first, input_precision=PRECISION)
                x = tl.dot(keys_second, q_second, x, input_precision=PRECISION)
            else:
                if K_GROUP:
                    page, place = find_block(table, i, n, count // S - 1, S, N)
                    keys = load_vectors(
                        k, k_scales, page[:, None], place[:, None], d[None, :], exists[:, None],
                        S, D, DP, K_PAGE, K_GROUP, False, K_DOT,
                    )  # fmt: skip
                else:
                    at_k = k + slot_offsets(location, n, S, N, K_PAGE, D)[:, None] + d[None, :]
                    keys = tl.load(at_k, mask=exists[:, None] & (d < D)[None, :], other=0)
                if K_INT8:
                    x = 256.0 * tl.dot(keys, q_high_byte).to(tl.float32) + tl.dot(keys, q_low_byte).to(tl.float32)
                else:
                    x = tl.dot(keys.to(K_DOT), queries, input_precision=PRECISION)
            if QUANTIZED and K_GROUP == 0:
                x *= load_scales_async(k_words, location, n, exists, S, N, D, K_PAGE)[:, None]
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
            finite_max = finite_or_zero(new_max)
            w = tl.exp2(x - finite_max[None, :])
            rescale = tl.exp2(row_max - finite_max)[None, :]
            sums = sums * rescale + w
            value_weights = w
            if V_PART:
                if V_PAIRS:
                    c = tl.arange(0, VP // 2)
                    at_v = v + slot_offsets(location, n, S, N, V_PAGE // 2, V // 2)[None, :] + c[:, None]
                    pairs = tl.load(at_v, mask=exists[None, :] & (c < V // 2)[:, None], other=0)
                    values_first, values_second = unpack_bytes(pairs, False, V_DOT), unpack_bytes(pairs, True, V_DOT)
                    scales = load_scales_async(v_words, location, n, exists, S, N, V, V_PAGE)
                    value_weights = w * (scales * WEIGHT_FACTOR)[:, None]
                else:
                    values_first, values_second = load_nibbles(
                        v, v_words, location, n, exists, S, N, V, V_PAGE, V_GROUP, V_DOT
                    )
                    values_first, values_second = tl.trans(values_first), tl.trans(values_second)
                value_weights = value_weights.to(V_DOT)
                acc_first = tl.dot(values_first, value_weights, acc_first * rescale, input_precision=PRECISION)
                acc_second = tl.dot(values_second, value_weights, acc_second * rescale, input_precision=PRECISION)
            else:
                if V_GROUP:
                    page, place = find_block(table, i, n, count // S - 1, S, N)
                    values = load_vectors(
                        v, v_scales, page[None, :], place[None, :], e[:, None], exists[None, :],
                        S, V, VP, V_PAGE, V_GROUP, False, V_DOT,
                    )  # fmt: skip
                else:
                    at_v = v + slot_offsets(location, n, S, N, V_PAGE, V)[None, :] + e[:, None]
                    values = tl.load(at_v, mask=exists[None, :] & (e < V)[:, None], other=0).to(V_DOT)
                acc = tl.dot(values, value_weights.to(V_DOT), acc * rescale, input_precision=PRECISION)
            if UPDATE_MASS:
                reference = new_max
                if NOISE != PLAIN:
                    changed = add_noise(x, kind, noise_keys, slot_pos[:, None], NOISE)
                    reference = tl.where(is_changed, (new_max + NOISE_BOUND) * inverse_temperature, new_max)
                    changed = changed * inverse_temperature[None, :] - finite_or_zero(reference)[None, :]
                    w = tl.where(is_changed[None, :], tl.exp2(changed), w)
                    z_rescale = tl.exp2((row_max - finite_max) * inverse_temperature)[None, :]
                    z_sums = z_sums * tl.where(is_changed[None, :], z_rescale, rescale) + w
                # Rows of weight 0 are stored, too, but accumulate_mass does not read them.
                to = split_weights + at_row[None, :] * max_slots + slot[:, None]
                tl.store(to, w.to(split_weights.dtype.element_ty), mask=exists[:, None] & (valid & scored)[None, :])
                tl.store(block_max + at_row * num_blocks + i, reference, mask=valid & scored)
            row_max = new_max
        at = ((j * G + g) * num_splits + split) * width + m
        tl.store(split_max + at, row_max, mask=valid)
        tl.store(split_sum + at, tl.sum(sums, 0), mask=valid)
        to = split_out + at.to(tl.int64)[None, :] * V
        if V_PART:
            columns = first_columns(VP, V_PART)[:, None]
            in_row = (columns < V) & valid[None, :]
            if V_PAIRS:
                acc_first, acc_second = acc_first / WEIGHT_FACTOR, acc_second / WEIGHT_FACTOR
            tl.store(to + columns, acc_first, mask=in_row)
            tl.store(to + columns + V_PART // 2, acc_second, mask=in_row)
        else:
            tl.store(to + e[:, None], acc, mask=(e < V)[:, None] & valid[None, :])
        if UPDATE_MASS and NOISE != PLAIN:  # the second half of the buffers
            z_at = tl.num_programs(0) * G * num_splits * width + at
            z_max = tl.where(is_changed, (row_max + NOISE_BOUND) * inverse_temperature, row_max)
            tl.store(split_max + z_at, z_max, mask=valid)
            tl.store(split_sum + z_at, tl.sum(z_sums, 0), mask=valid)
