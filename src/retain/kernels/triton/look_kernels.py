"""The kernels of a look: score slots by keys in 4 bits, rank them, choose the best, and attend to means of the others.

A tile is one token here, and J tiles have arrays of their own in each kv head: scores float32 [J, G, R, max_slots] in
base 2, -inf where the token sees no slot, and ranks int64 [J, G, max_slots]. A rank is the priority of a slot, as bits
of a float32, followed by its position, so no two are equal; SEEN for slots of groups that the token does not see whole,
and -1 for what it does not see. A token attends to the slots whose ranks are no lower than a threshold.

Weights are those of blocks of N slots from the beginning of the table, so they do not depend on other requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.slots import pool_dtypes, reinterpret
from retain.kernels.triton.decode_kernels import split_blocks
from retain.kernels.triton.noise import LOG2E
from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.quantized_loads import (
    find_block,
    find_slots,
    first_columns,
    load_nibbles,
    load_slot_scales,
    load_vectors,
    locate_block,
)
from retain.kernels.triton.slots import round_to_bfloat16
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores, finite_or_zero, safe_log2

GROUP = tl.constexpr(reinterpret.SKETCH_GROUP)  # slots whose values have one mean
CHUNK = tl.constexpr(256)  # blocks whose maxima are read at once
SEEN = tl.constexpr(2**63 - 1)  # above the rank of every slot that can be chosen
LARGEST_VALUE, LARGEST_FLOAT16 = tl.constexpr(pool_dtypes.LARGEST_VALUE), tl.constexpr(pool_dtypes.LARGEST_FLOAT16)
OF_ANY_SIZE = ("max_slots", "num_blocks", "width", "num_splits", "first_split", "looks")


@triton.jit
def slots_of_tile(tiles, j, g, counts, count_row, count_head, S: tl.constexpr):
    """Return the row of tile j in the tables, its token, and the slots of its table; no slots where it is padding."""
    row, t, tokens = tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3)
    count = tl.load(counts + row * count_row + g * count_head) * S
    return row, t, tl.where(tokens == 0, 0, count)


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, *OF_ANY_SIZE])
def score_sketches(
    q, q_token, q_head, k, k_scales, k_words, pos,
    pages, page_row, page_head, counts, count_row, count_head, windows, window_row,
    tiles, q_pos, slopes, factor, softcap, scores, block_max, block_sum, max_slots, num_blocks,
    G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, S: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, K_PAGE: tl.constexpr, K_GROUP: tl.constexpr, K_HALVES: tl.constexpr,
):  # fmt: skip
    """Score BLOCKS blocks of N slots for one token and R query heads; write each block's maximum and its sum.

    A kv head has PARTS such programs, where it has more query heads than fit into one. G counts these.
    """
    K_PART: tl.constexpr = K_GROUP if K_HALVES else 0
    j, g = tl.program_id(0), tl.program_id(1)
    row, t, count = slots_of_tile(tiles, j, g // PARTS, counts, count_row, count_head, S)
    first_block = tl.program_id(2) * BLOCKS
    if first_block * N >= count:
        return
    r, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, DP)
    valid = r < R
    at_q = q + t.to(tl.int64) * q_token + (g * R + r)[None, :] * q_head
    if K_PART:
        columns = first_columns(DP, K_PART)[:, None]
        in_row = (columns < D) & valid[None, :]
        q_first = tl.load(at_q + columns, mask=in_row, other=0.0).to(DOT)
        q_second = tl.load(at_q + columns + K_PART // 2, mask=in_row, other=0.0).to(DOT)
    else:
        queries = tl.load(at_q + d[:, None], mask=(d < D)[:, None] & valid[None, :], other=0.0).to(DOT)
    p, window = tl.load(q_pos + t), tl.load(windows + row * window_row)
    slope = tl.load(slopes + g * R + r, mask=valid, other=0.0) * LOG2E if ALIBI else 0.0
    table = pages + row.to(tl.int64) * page_row + g // PARTS * page_head
    at_row = ((j * G + g) * R + r).to(tl.int64)
    for i in range(first_block, tl.minimum(first_block + BLOCKS, (count + N - 1) // N)):
        slot = i * N + n
        exists = slot < count
        page, place = find_block(table, i, n, count // S - 1, S, N)
        slot_pos = tl.load(pos + page * S + place, mask=exists, other=-1)
        if K_PART:
            location = locate_block(table, i, n, count // S - 1, S, N)
            keys_first, keys_second = load_nibbles(k, k_words, location, n, exists, S, N, D, K_PAGE, K_GROUP, DOT)
            x = tl.dot(keys_first, q_first, input_precision=PRECISION)
            x = tl.dot(keys_second, q_second, x, input_precision=PRECISION)
        else:
            keys = load_vectors(
                k, k_scales, page[:, None], place[:, None], d[None, :], exists[:, None],
                S, D, DP, K_PAGE, K_GROUP, False, DOT,
            )  # fmt: skip
            x = tl.dot(keys, queries, input_precision=PRECISION)
        x *= factor
        if SOFTCAP:
            x = cap_scores(x, softcap)
        if ALIBI:
            x += slope[None, :] * (slot_pos[:, None] - p).to(tl.float32)
        seen = (slot_pos >= 0) & (slot_pos <= p) & (p - slot_pos < window)
        x = tl.where(seen[:, None], x, float("-inf"))
        tl.store(scores + at_row[None, :] * max_slots + slot[:, None], x, mask=exists[:, None] & valid[None, :])
        high = tl.max(x, 0)
        total = tl.sum(tl.exp2(x - finite_or_zero(high)[None, :]), 0)
        tl.store(block_max + at_row * num_blocks + i, high, mask=valid)
        tl.store(block_sum + at_row * num_blocks + i, total, mask=valid)


@triton.jit
def add_blocks(block_max, block_sum, count, sink, N: tl.constexpr, SINKS: tl.constexpr):
    """Return the log of the sum of a row's weights, in base 2, from its blocks of N of `count` slots."""
    i = tl.arange(0, CHUNK)
    high = tl.full((), float("-inf"), tl.float32)
    for first in range(0, (count + N - 1) // N, CHUNK):
        maxima = tl.load(block_max + first + i, mask=(first + i) * N < count, other=float("-inf"))
        high = tl.maximum(high, tl.max(maxima, 0))
    finite = finite_or_zero(high)
    total = tl.exp2(sink - finite) if SINKS else 0.0
    for first in range(0, (count + N - 1) // N, CHUNK):
        exists = (first + i) * N < count
        maxima = tl.load(block_max + first + i, mask=exists, other=float("-inf"))
        total += tl.sum(tl.load(block_sum + first + i, mask=exists, other=0.0) * tl.exp2(maxima - finite), 0)
    return finite + safe_log2(total)


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, *OF_ANY_SIZE])
def rank_slots(
    pos, sketches, pages, page_row, page_head, counts, count_row, count_head, tiles,
    scores, block_max, block_sum, sinks, ranks, max_slots, num_blocks,
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SINKS: tl.constexpr,
    SKETCH_PAGE: tl.constexpr, DEVIATIONS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the ranks of SLOTS slots of one tile and kv head: by the sum of the weights of its R query heads.

    Pages of sketches are SKETCH_PAGE numbers of bfloat16 apart; deviations begin at DEVIATIONS.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    row, _, count = slots_of_tile(tiles, j, g, counts, count_row, count_head, S)
    slot = tl.program_id(2) * SLOTS + tl.arange(0, SLOTS)
    if tl.program_id(2) * SLOTS >= count:
        return
    page, place, exists = find_slots(pages + row.to(tl.int64) * page_row + g * page_head, slot, count, S)
    at_head = (j * G + g).to(tl.int64)
    weights, is_seen = tl.zeros((SLOTS,), tl.float32), exists
    for r in tl.static_range(R):
        at_row = at_head * R + r
        sink = tl.load(sinks + g * R + r) * LOG2E if SINKS else 0.0
        log_sum = add_blocks(block_max + at_row * num_blocks, block_sum + at_row * num_blocks, count, sink, N, SINKS)
        x = tl.load(scores + at_row * max_slots + slot, mask=exists, other=float("-inf"))
        weights += tl.exp2(x - log_sum)
        is_seen &= x > float("-inf")
    deviation = tl.load(sketches + page * SKETCH_PAGE + DEVIATIONS + place, mask=exists, other=0.0).to(tl.float32)
    seen_in_group = tl.min(tl.reshape(is_seen.to(tl.int32), (SLOTS // GROUP, GROUP)), 1)
    is_whole = tl.reshape(tl.broadcast_to(seen_in_group[:, None], (SLOTS // GROUP, GROUP)), (SLOTS,)) != 0
    p = tl.load(pos + page * S + place, mask=exists, other=-1).to(tl.int64)
    rank = ((weights * deviation).to(tl.int32, bitcast=True).to(tl.int64) << 32) + p
    rank = tl.where(is_seen, tl.where(is_whole, rank, SEEN), -1)
    tl.store(ranks + at_head * max_slots + slot, rank, mask=exists)


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, *OF_ANY_SIZE])
def choose_slots(
    pages, page_row, page_head, counts, count_row, count_head, windows, window_row, tiles,
    looks, ranks, thresholds, chosen, num_chosen, max_slots,
    G: tl.constexpr, S: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Find the threshold of one tile and kv head, and write the slots that it attends to, in the order of its table.

    The n-th highest rank is found digit by digit (radix select), and no further than is needed. Where its request has a
    window, a token attends to the whole table.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    row, _, count = slots_of_tile(tiles, j, g, counts, count_row, count_head, S)
    at_head = (j * G + g).to(tl.int64)
    ranks += at_head * max_slots
    missing = tl.load(looks + j)  # slots still to be found below those of higher digits
    has_window = tl.load(windows + row * window_row) != NO_WINDOW
    digits, n = tl.arange(0, 256), tl.arange(0, SLOTS)
    shift, prefix, threshold = 56, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    while shift >= 0:
        found = tl.zeros((256,), tl.int32)
        for first in range(0, count, SLOTS):
            rank = tl.load(ranks + first + n, mask=first + n < count, other=-1)
            is_candidate = (rank >= 0) & (rank != SEEN) & (rank >> shift >> 8 == prefix)
            found += tl.histogram((rank >> shift & 255).to(tl.int32), 256, mask=is_candidate)
        above = tl.sum(found, 0) - tl.cumsum(found, 0)  # how many have a higher digit
        is_digit = (above < missing) & (missing <= above + found)
        digit = tl.max(tl.where(is_digit, digits, -1), 0)  # -1 where all are too few: at the first digit, if at all
        missing -= tl.sum(tl.where(is_digit, above, 0), 0)
        has_all = tl.sum(tl.where(is_digit, found, 0), 0) == missing
        prefix = prefix * 256 + digit
        threshold = tl.where(digit < 0, 0, prefix << shift)
        shift = tl.where(has_all | (digit < 0), -1, shift - 8)
    threshold = tl.where(has_window, -1, threshold)
    tl.store(thresholds + at_head, threshold)
    end = 0
    table = pages + row.to(tl.int64) * page_row + g * page_head
    for first in range(0, count, SLOTS):
        page, place, exists = find_slots(table, first + n, count, S)
        rank = tl.load(ranks + first + n, mask=exists, other=-1)
        is_attended = (exists & (rank >= threshold)).to(tl.int32)
        to = chosen + at_head * max_slots + end + tl.cumsum(is_attended, 0) - 1
        tl.store(to, (page * S + place).to(tl.int32), mask=is_attended != 0)
        end += tl.sum(is_attended, 0)
    tl.store(num_chosen + at_head, end)


@triton.jit(do_not_specialize=["chosen", "num_chosen", "max_slots"])
def gather_slots(
    x, scales, pos, to, to_scales, to_pos, chosen, num_chosen, max_slots,
    G: tl.constexpr, S: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, PAGE: tl.constexpr, TO_PAGE: tl.constexpr,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, FIRST_SCALE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Copy K or V of N chosen slots of one tile and kv head, and their positions, into pages of their own.

    These follow page 0, and the last one ends with holes. A slot has W numbers; pages are PAGE, and TO_PAGE, numbers
    apart. If there are SCALES of a slot, numbers are bytes; scales are S apart, and begin at FIRST_SCALE.
    """
    at_head = (tl.program_id(0) * G + tl.program_id(1)).to(tl.int64)
    i = tl.program_id(2) * N + tl.arange(0, N)
    count = tl.load(num_chosen + at_head)
    end = (count + S - 1) // S * S
    if tl.program_id(2) * N >= end:
        return
    exists, is_written = (i < count)[:, None], (i < end)[:, None]
    slot = tl.load(chosen + at_head * max_slots + i, mask=i < count, other=0).to(tl.int64)
    page, place = (slot // S)[:, None], (slot % S)[:, None]
    to_slot = S + at_head * max_slots + i
    to_page, to_place = (to_slot // S)[:, None], (to_slot % S)[:, None]
    tl.store(to_pos + to_slot, tl.load(pos + slot, mask=i < count, other=-1), mask=i < end)
    w = tl.arange(0, WP)[None, :]
    number = tl.load(x + page * PAGE + place * W + w, mask=exists & (w < W), other=0)
    tl.store(to + to_page * TO_PAGE + to_place * W + w, number, mask=is_written & (w < W))
    if SCALES:
        c = tl.arange(0, SCALE_ROWS)[None, :]
        scale = tl.load(scales + page * (PAGE // 2) + FIRST_SCALE + c * S + place, mask=exists & (c < SCALES), other=0)
        to_scale = to_scales + to_page * (TO_PAGE // 2) + FIRST_SCALE + c * S + to_place
        tl.store(to_scale, scale, mask=is_written & (c < SCALES))


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, *OF_ANY_SIZE, "split_max", "split_sum"])
def attend_to_means(
    split_max, split_sum, split_out, width, num_splits, first_split, sketches,
    pages, page_row, page_head, counts, count_row, count_head, tiles, scores, ranks, thresholds, max_slots,
    G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, N: tl.constexpr, MIN_BLOCKS: tl.constexpr, SKETCH_PAGE: tl.constexpr, MEANS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a split of the groups for one token: what their means add for the slots that are not chosen.

    G counts parts of kv heads, of R query heads each.
    """
    j, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, _, count = slots_of_tile(tiles, j, g // PARTS, counts, count_row, count_head, S)
    groups = count // GROUP
    blocks, blocks_per_split, splits = split_blocks(groups, N, MIN_BLOCKS)
    if split >= splits:
        return
    at_head, at_choice = (j * G + g).to(tl.int64), (j * (G // PARTS) + g // PARTS).to(tl.int64)
    threshold = tl.load(thresholds + at_choice)
    table = pages + row.to(tl.int64) * page_row + g // PARTS * page_head
    r, e = tl.arange(0, M), tl.arange(0, VP)
    n, c = tl.arange(0, N), tl.arange(0, GROUP)
    valid = r < R
    row_max, sums = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((VP, M), tl.float32)
    for i in range(split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, blocks)):
        group = i * N + n
        exists = group < groups
        slot = group[:, None] * GROUP + c[None, :]
        rank = tl.load(ranks + at_choice * max_slots + slot, mask=exists[:, None], other=-1)
        is_other = (rank >= 0) & (rank < threshold)
        at = (at_head * R + r)[None, None, :] * max_slots + slot[:, :, None]
        x = tl.load(scores + at, mask=is_other[:, :, None] & valid[None, None, :], other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(tl.max(x, 1), 0))
        finite_max = finite_or_zero(new_max)
        w = tl.sum(tl.exp2(x - finite_max[None, None, :]), 1)  # [N, M]
        rescale = tl.exp2(row_max - finite_max)
        page, place, is_slot = find_slots(table, group * GROUP, count, S)
        at_mean = sketches + page * SKETCH_PAGE + MEANS + place // GROUP * V
        means = tl.load(at_mean[None, :] + e[:, None], mask=is_slot[None, :] & (e < V)[:, None], other=0.0)
        if DOT == tl.float16:  # which a mean of its largest values, rounded to bfloat16, is too large for
            means = tl.minimum(tl.maximum(means.to(tl.float32), -LARGEST_FLOAT16), LARGEST_FLOAT16)
        acc = tl.dot(means.to(DOT), w.to(DOT), acc * rescale[None, :], input_precision=PRECISION)
        sums = sums * rescale + tl.sum(w, 0)
        row_max = new_max
    at = (at_head * num_splits + first_split + split) * width + r
    tl.store(split_max + at, row_max, mask=valid)
    tl.store(split_sum + at, sums, mask=valid)
    tl.store(split_out + at[None, :] * V + e[:, None], acc, mask=(e < V)[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["slots", "slot_head", "slot_token"])
def summarize_groups(
    slots, slot_head, slot_token, pos, v, v_scales, sketches,
    S: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, V_PAGE: tl.constexpr, V_GROUP: tl.constexpr,
    QUANTIZED: tl.constexpr, SKETCH_PAGE: tl.constexpr, MEANS: tl.constexpr, DEVIATIONS: tl.constexpr,
):  # fmt: skip
    """Write the mean of the values of the group that a token was written into, and how far they are from it.

    Not where the group is not full yet, nor where a later token is in its last slot, as in a prompt.
    """
    t, g = tl.program_id(0), tl.program_id(1)
    at = slots + g * slot_head + t.to(tl.int64) * slot_token
    slot = tl.load(at).to(tl.int64)
    last = slot // GROUP * GROUP + GROUP - 1
    is_inside = (t + (last - slot) < tl.num_programs(0)) & (last > slot)
    is_followed = tl.load(at + (last - slot) * slot_token, mask=is_inside, other=-1) == last
    if is_followed | (tl.load(pos + last) < 0):
        return
    page, first = slot // S, slot % S // GROUP * GROUP
    place, e = first + tl.arange(0, GROUP), tl.arange(0, VP)
    exists = place >= 0
    pages = page + tl.zeros_like(place)
    values = load_vectors(
        v, v_scales, pages[:, None], place[:, None], e[None, :], exists[:, None],
        S, V, VP, V_PAGE, V_GROUP, False, tl.float32,
    )  # fmt: skip
    if QUANTIZED and V_GROUP == 0:
        values *= load_slot_scales(v_scales, pages, place, exists, S, V, V_PAGE)[:, None]
    in_row = e < V
    values = tl.where(in_row[None, :], values, 0.0)
    mean = round_to_bfloat16(tl.sum(values, 0) / GROUP)
    at = sketches + page * SKETCH_PAGE
    tl.store(at + MEANS + first // GROUP * V + e, mean.to(tl.bfloat16), mask=in_row)
    distance = tl.where(in_row[None, :], values - mean[None, :], 0.0)
    deviation = round_to_bfloat16(tl.minimum(tl.sqrt_rn(tl.sum(distance * distance, 1)), LARGEST_VALUE))
    tl.store(at + DEVIATIONS + place, deviation.to(tl.bfloat16))
