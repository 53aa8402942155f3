"""Attention kernels: a tile of query rows attends to the slots of one kv head, or to a split of them.

A query row is a fresh token of one query head. The rows of the heads that share a kv head lie together (row m is token
m // R, head m % R), so K and V are read once for all of them. Tiles with few rows attend to the splits of a table in
parallel; merge_kernels.py combines the splits (split-K). Tiles of many rows go through all slots. A table is split by
its own length alone, so that a token's bits do not depend on the other requests. Scores are in base 2.

Demoted tokens have tables and pages of their own (PART). Their splits follow those of the other tokens, and are merged
with them. A tile that is not split goes through them in a second launch, which continues from the output of the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.api import NO_WINDOW
from retain.kernels.triton.noise import LOG2E, add_noise, mean_noise, noise_key

MAX_SPLITS = tl.constexpr(64)  # splits of a table, at most
MIN_SPLIT_BLOCKS = tl.constexpr(4)  # blocks of slots in a split, at least
ONLY, FIRST, SECOND = (tl.constexpr(i) for i in range(3))  # PART: the tables of a launch without splits
_NO_WINDOW = tl.constexpr(NO_WINDOW)


@triton.jit
def split_size(blocks):
    """Return the blocks in each split of a table."""
    return tl.maximum(MIN_SPLIT_BLOCKS, (blocks + MAX_SPLITS - 1) // MAX_SPLITS)


@triton.jit
def load_positions(pos, page, place, i, dense, N: tl.constexpr, S: tl.constexpr):
    """Return the positions of N slots, block i of a table, at `place` in a page. Dense: slot i holds position i."""
    n = tl.arange(0, N)
    loaded = tl.load(pos + page * S + place + n, mask=n < tl.where(dense, 0, N), other=-1)
    return tl.where(dense, i * N + n, loaded)


@triton.jit
def load_scales(scales, page, place, N: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the scales float32 [N] of slots at `place` in a page of 8 bits."""
    return tl.load(scales + page * (PAGE // 2) + S * D // 2 + place + tl.arange(0, N)).to(tl.float32)


@triton.jit
def load_4bit(x, scales, page, n, d, S: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr):
    """Return numbers d of slots n of a page, float32: [N, D] of n [N, 1] and d [1, D], or [D, N] of both transposed.

    The second half of each group of numbers is in high nibbles.
    """
    byte = d // GROUP * (GROUP // 2) + d % (GROUP // 2)
    shift = d // (GROUP // 2) % 2 * 4
    packed = tl.load(x + page * PAGE + n * (D // 2) + byte, mask=d < D, other=0)
    at_scale = page * (PAGE // 2) + S * D // 4 + d // GROUP * S + n
    scale = tl.load(scales + at_scale, mask=d < D, other=0.0).to(tl.float32)
    return ((packed.to(tl.int32) >> shift & 15) - 8).to(tl.float32) * scale


@triton.jit
def load_keys(
    k, scales, page, place, d, factor,
    N: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr,
    K_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr,
):  # fmt: skip
    """Return keys [D, N] of slots at `place` in a page, and the factor of their scores.

    The factor is the given number. For keys of 8 bits, which stay integers, it is [1, N]: times the scales.
    """
    n = (place + tl.arange(0, N))[None, :]
    if K_GROUP:
        keys = load_4bit(k, scales, page, n, d[:, None], S, D, K_PAGE, K_GROUP)
    else:
        keys = tl.load(k + page * K_PAGE + n * D + d[:, None], mask=(d < D)[:, None], other=0)
        if QUANTIZED:
            factor = factor * load_scales(scales, page, place, N, S, D, K_PAGE)[None, :]
    return keys.to(DOT), factor


@triton.jit
def compute_scores(
    q, keys, pos, q_pos, slopes, factor, softcap, window,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores [M, N] in base 2, -inf where a row does not see a slot.

    q [M, D], keys [D, N]; factor is a number, or [1, N] with the scales of keys. With SOFTCAP it is one for
    base e.
    """
    p, s = q_pos[:, None], pos[None, :]
    x = tl.dot(q, keys, input_precision=PRECISION) * factor
    if SOFTCAP:
        x = softcap * LOG2E * (1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / softcap))))  # softcap * tanh(x / softcap)
    if ALIBI:
        x += slopes[:, None] * (s - p).to(tl.float32)
    visible = (s >= 0) & (s <= p) & (p - s < window)
    return tl.where(visible, x, float("-inf"))


@triton.jit
def finite_or_zero(x):
    """Replace -inf by 0, so that subtracting a row's maximum from -inf never gives NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def safe_log2(total):
    """Return log2 of a sum, and 0 for an empty sum: its row's maximum is -inf already."""
    return tl.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=["layer"])
def attention_fwd(
    q, q_token, q_head, o, split_max, split_sum, split_out, width,  # o [T, H, V]; splits [J, G, splits, width (, V)]
    k, v, k_scales, v_scales, pos,
    pages, page_row, page_head, counts, count_row, count_head, windows, window_row, dense,
    tiles, q_pos, slopes, factor, softcap, sinks, num_splits,
    weights, temperature, noise, seed, redraw_noise, layer,
    lse, split_weights, tile_max, max_slots,  # with UPDATE_MASS: lse [T, H], split_weights [t, H, max_slots]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, DOT: tl.constexpr, UPDATE_MASS: tl.constexpr,
    NOISE: tl.constexpr, PRECISION: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile and one kv head: over one split of the slots (SPLIT), or over all of them.

    Without splits the FIRST launch leaves the logarithm of a row's sum in split_max [T, H], from which the SECOND goes
    on over the demoted tokens.
    """
    j, g = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens, m0 = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3),
        tl.load(tiles + 6 * j + 4),
    )  # fmt: skip
    if tokens == 0:
        return
    blocks = tl.load(counts + row * count_row + g * count_head) * (S // N)
    begin, end = 0, blocks
    if PART == SECOND:  # noqa: SIM102 (the compiler evaluates the outer condition, the device the inner one)
        if blocks == 0:
            return
    if SPLIT:
        n = split_size(blocks)
        begin = tl.program_id(2) * n
        end = tl.minimum(begin + n, blocks)
        if begin >= end:
            return
    m = m0 + tl.arange(0, M)
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    q = tl.load(
        q + t.to(tl.int64)[:, None] * q_token + h[:, None] * q_head + d[None, :],
        mask=valid[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(DOT)  # [M, DP]
    p = tl.load(q_pos + t, mask=valid, other=-1)  # padding rows see nothing
    window = tl.load(windows + row * window_row)
    slope = tl.load(slopes + h, mask=valid, other=0.0) * LOG2E if ALIBI else p
    is_dense = window < 0  # false, as a tensor
    if DENSE:
        is_dense = (window == _NO_WINDOW) & (tl.load(dense + row) != 0)
        if not UPDATE_MASS and is_dense:  # no slot behind the newest query is visible
            end = tl.minimum(end, (tl.max(p, 0) + N) // N)
    if UPDATE_MASS:
        scored = (window == _NO_WINDOW) & (tl.max(tl.load(weights + t, mask=valid, other=0.0), 0) != 0.0)
        kind = tl.load(noise + b)
        keys = noise_key(tl.load(seed + b), layer, g, tl.where(tl.load(redraw_noise + b) == 1, p, -1))
        inverse_temperature = 1.0 / tl.load(temperature + t, mask=valid, other=1.0)
        z_max, z_sum = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    row_max, row_sum = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, VP), tl.float32)
    if SINKS and (not SPLIT and PART != SECOND):  # as a slot without a value; splits get it when they are merged
        row_max = tl.load(sinks + h, mask=valid, other=0.0) * LOG2E
        row_sum = tl.full((M,), 1.0, tl.float32)
        if UPDATE_MASS:
            z_max = (row_max + mean_noise(kind, NOISE)) * inverse_temperature
            z_sum = row_sum
    if PART == SECOND:  # the output so far is a mean with a sum of 1
        row_max = tl.load(split_max + t * G * R + h, mask=valid, other=float("-inf"))
        row_sum = tl.where(row_max > float("-inf"), 1.0, 0.0)
        at_row = o + t.to(tl.int64)[:, None] * G * R * V + h[:, None] * V
        acc = tl.load(at_row + e[None, :], mask=valid[:, None] & (e < V)[None, :], other=0.0).to(tl.float32)
        if UPDATE_MASS:
            z_max = tl.load(lse + t * G * R + h, mask=valid, other=float("-inf"))
            z_sum = tl.where(z_max > float("-inf"), 1.0, 0.0)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    for i in range(begin, end):
        page, place = tl.load(table + i * N // S).to(tl.int64), i * N % S
        slot = (place + tl.arange(0, N))[:, None]
        slot_pos = load_positions(pos, page, place, i, is_dense, N, S)
        kt, key_factor = load_keys(k, k_scales, page, place, d, factor, N, S, D, DOT, K_PAGE, QUANTIZED, K_GROUP)
        x = compute_scores(q, kt, slot_pos, p, slope, key_factor, softcap, window, ALIBI, SOFTCAP, PRECISION)
        new_max = tl.maximum(row_max, tl.max(x, 1))
        w = tl.exp2(x - finite_or_zero(new_max)[:, None])
        rescale = tl.exp2(row_max - finite_or_zero(new_max))
        row_sum = row_sum * rescale + tl.sum(w, 1)
        value_weights = w
        if V_GROUP:
            vs = load_4bit(v, v_scales, page, slot, e[None, :], S, V, V_PAGE, V_GROUP)  # [N, VP]
        else:
            vs = tl.load(v + page * V_PAGE + slot * V + e[None, :], mask=(e < V)[None, :], other=0)
            if QUANTIZED:
                value_weights = w * load_scales(v_scales, page, place, N, S, V, V_PAGE)[None, :]
        acc = tl.dot(value_weights.to(DOT), vs.to(DOT), acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
        if UPDATE_MASS:  # noqa: SIM102 (the compiler evaluates the outer condition, the device the inner one)
            if scored:  # rows of weight 0 are written too, but accumulate_mass does not read them
                z = add_noise(x, kind, keys, slot_pos, NOISE) * inverse_temperature[:, None]
                block_max = tl.max(z, 1)
                w = tl.exp2(z - finite_or_zero(block_max)[:, None])
                if SPLIT:
                    at_row = ((tl.load(tiles + 6 * j + 5) + m // R) * G * R + h).to(tl.int64)
                    to = split_weights + at_row[:, None] * max_slots + i * N + tl.arange(0, N)[None, :]
                    tl.store(to, w.to(split_weights.dtype.element_ty), mask=valid[:, None])
                    tl.store(tile_max + at_row * (max_slots // N) + i, block_max, mask=valid)
                up = tl.maximum(z_max, block_max)
                z_sum *= tl.exp2(z_max - finite_or_zero(up))
                z_sum += tl.sum(w, 1) * tl.exp2(block_max - finite_or_zero(up))
                z_max = up
    if SPLIT:
        at = ((j * G + g) * num_splits + tl.program_id(2)) * width + tl.arange(0, M)
        tl.store(split_max + at, row_max, mask=valid)
        tl.store(split_sum + at, row_sum, mask=valid)
        tl.store(split_out + at.to(tl.int64)[:, None] * V + e[None, :], acc, mask=valid[:, None] & (e < V)[None, :])
        if UPDATE_MASS:
            z_at = tl.num_programs(0) * G * num_splits * width + at  # the second half of the buffers
            tl.store(split_max + z_at, z_max, mask=valid)
            tl.store(split_sum + z_at, z_sum, mask=valid)
    else:
        out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        to = o + t.to(tl.int64)[:, None] * G * R * V + h[:, None] * V + e[None, :]
        tl.store(to, out.to(o.dtype.element_ty), mask=valid[:, None] & (e < V)[None, :])
        if PART == FIRST:
            tl.store(split_max + t * G * R + h, row_max + safe_log2(row_sum), mask=valid)
        if UPDATE_MASS:
            tl.store(lse + t * G * R + h, z_max + safe_log2(z_sum), mask=valid)
