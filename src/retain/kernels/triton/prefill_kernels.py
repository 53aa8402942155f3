"""Attention of prefill tiles: a tile of many query rows goes through all slots of its kv head.

Rows lie as in decode_kernels.py. Where slot i of a table holds position i (a dense row without a window), the blocks
that all rows of a tile see come first and need neither masks nor positions; the blocks at the diagonal need both. All
blocks of other tables are masked. A block is N slots, of one page or several.

Demoted tokens have tables and pages of their own (PART): a second launch goes on from the output of the first.

Gumbel noise without a temperature is a factor of weights. Where rows share it, a tile draws it once, not for each
row: the sum of a row's changed weights is a column of a product of weights and noise (NOISE_COLUMNS).
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.noise import LOG2E, add_noise, draw_gumbel_factors, mean_noise, noise_draw, noise_key
from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.quantized_loads import find_block, load_slot_scales, load_vectors
from retain.kernels.triton.softmax import NO_WINDOW, cap_scores, finite_or_zero, safe_log2

ONLY, FIRST, SECOND = (tl.constexpr(i) for i in range(3))  # PART: the tables of a launch
_BEHIND_ALL = tl.constexpr(2**31 - 1)  # the position of a slot that no row sees
# CHANGE: how scoring changes a softmax: not at all, by factors of its weights, or by noise and temperature of scores
UNCHANGED, WEIGHTS, SCORES = (tl.constexpr(i) for i in range(3))


@triton.jit
def attend_blocks(
    begin, end, row_max, row_sum, acc, z_max, z_sum,
    q, p, slope, factor, softcap, window, is_dense, oldest, newest,
    k, v, k_scales, v_scales, pos, table, count, kind, keys, inverse_temperature,
    S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, CHANGE: tl.constexpr, NOISE: tl.constexpr,
    NOISE_COLUMNS: tl.constexpr, NOISE_DOT: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax of a tile over blocks of slots: all rows see them, or MASKED says which do.

    Products are scores but for `unit`, which costs nothing as part of the exponent. Biases are relative to a position
    nearby. Changed WEIGHTS have the sum z_sum relative to row_max, those of changed SCORES relative to z_max. With
    NOISE_COLUMNS z_sum is [M, NOISE_COLUMNS].
    """
    CAPPED: tl.constexpr = SOFTCAP or (QUANTIZED and not K_GROUP)  # products that `unit` cannot make scores
    n, d, e = tl.arange(0, N), tl.arange(0, DP), tl.arange(0, VP)
    unit = 1.0 if CAPPED else factor
    for i in range(begin, end):
        page, place = find_block(table, i, n, count - 1, S, N)
        slot_pos = i * N + n
        base = i * N
        there = n >= 0
        if MASKED:
            loaded = tl.load(pos + page * S + place)
            exists = slot_pos < count * S
            slot_pos = tl.where(is_dense, slot_pos, loaded)
            there = exists & (slot_pos >= 0) & (slot_pos <= newest)
            slot_pos = tl.where(there, slot_pos, _BEHIND_ALL)
            base = oldest
        kt = load_vectors(
            k, k_scales, page[None, :], place[None, :], d[:, None], there[None, :],
            S, D, DP, K_PAGE, K_GROUP, False, DOT,
        )  # fmt: skip
        x = tl.dot(q, kt, input_precision=PRECISION)
        if QUANTIZED and not K_GROUP:
            x *= factor * load_slot_scales(k_scales, page, place, there, S, D, K_PAGE)[None, :]
        elif SOFTCAP:
            x *= factor
        if SOFTCAP:
            x = cap_scores(x, softcap)
        offset = tl.zeros_like(row_max)
        if ALIBI:
            x += (slope / unit)[:, None] * (slot_pos - base).to(tl.float32)[None, :]
            offset = slope * (base - p).to(tl.float32)
        if MASKED:
            distance = p[:, None] - slot_pos[None, :]
            visible = distance.to(tl.uint32, bitcast=True) < window.to(tl.uint32, bitcast=True)  # later slots: 2^31 on
            x = tl.where(visible, x, float("-inf"))
        if CHANGE == SCORES:
            z = x * unit + offset[:, None]
            z = add_noise(z, kind, keys[:, None], slot_pos[None, :], NOISE) * inverse_temperature[:, None]
            new_z_max = tl.maximum(z_max, tl.max(z, 1))
            z_high = finite_or_zero(new_z_max)
            z_sum = z_sum * tl.exp2(z_max - z_high) + tl.sum(tl.exp2(z - z_high[:, None]), 1)
            z_max = new_z_max
        new_max = tl.maximum(row_max, tl.max(x, 1) * unit + offset)
        high = finite_or_zero(new_max) if MASKED else new_max
        w = tl.exp2(x * unit - (high - offset)[:, None])
        rescale = tl.exp2(row_max - high)
        row_sum = row_sum * rescale + tl.sum(w, 1)
        vs = load_vectors(
            v, v_scales, page[:, None], place[:, None], e[None, :], there[:, None],
            S, V, VP, V_PAGE, V_GROUP, MASKED, DOT,
        )  # fmt: skip
        value_weights = w
        if QUANTIZED and not V_GROUP:
            value_weights *= load_slot_scales(v_scales, page, place, there, S, V, V_PAGE)[None, :]
        acc = tl.dot(value_weights.to(DOT), vs, acc * rescale[:, None], input_precision=PRECISION)
        if CHANGE == WEIGHTS and NOISE_COLUMNS:
            factors = draw_gumbel_factors(kind, keys[None, :], slot_pos[:, None]).to(NOISE_DOT)
            z_sum = tl.dot(w.to(NOISE_DOT), factors, z_sum * rescale[:, None], input_precision=PRECISION)
        elif CHANGE == WEIGHTS:  # behind the product, which tensor cores compute meanwhile
            z_sum = z_sum * rescale + tl.sum(w * draw_gumbel_factors(kind, keys[:, None], slot_pos[None, :]), 1)
        row_max = new_max
    return row_max, row_sum, acc, z_max, z_sum


@triton.jit
def own_noise(p, oldest, period, NOISE_COLUMNS: tl.constexpr):
    """Return a mask bool [M, NOISE_COLUMNS]: the column of the noise of rows at positions p.

    The first column is that of the oldest position. Positions are consecutive, so there are columns for all.
    """
    own = noise_draw(p, period) - noise_draw(oldest, period)
    return own[:, None] == tl.arange(0, NOISE_COLUMNS)[None, :]


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, "layer", "T"])
def attention_prefill(
    q, q_token, q_head, o, log_sums,  # o [T, H, V]; log_sums [T, H], from the FIRST launch to the SECOND
    k, v, k_scales, v_scales, pos,
    pages, page_row, page_head, counts, count_row, count_head, windows, window_row, dense,
    tiles, q_pos, slopes, factor, softcap, sinks,
    weights, temperature, noise, seed, noise_period, layer, lse, log_weights, T,  # lse [T, H], log_weights [H, T]
    G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PART: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, DOT: tl.constexpr, UPDATE_MASS: tl.constexpr,
    CHANGE: tl.constexpr, NOISE: tl.constexpr, REDRAW: tl.constexpr, NOISE_COLUMNS: tl.constexpr,
    NOISE_DOT: tl.constexpr, PRECISION: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, QUANTIZED: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of M query rows of one kv head.

    With UPDATE_MASS it leaves what prefill_mass_kernels.py starts from: log2 of a query's weight over its sum, -inf
    where it adds nothing. What scoring changes (CHANGE) has sums of its own.
    """
    g, j = tl.program_id(0), tl.program_id(1)
    b, row, first, tokens, m0 = (
        tl.load(tiles + 6 * j), tl.load(tiles + 6 * j + 1), tl.load(tiles + 6 * j + 2), tl.load(tiles + 6 * j + 3),
        tl.load(tiles + 6 * j + 4),
    )  # fmt: skip
    count = tl.load(counts + row * count_row + g * count_head)
    if PART == SECOND:  # noqa: SIM102 (the compiler evaluates the outer condition, the device the inner one)
        if count == 0:
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
    # Not the least and the largest of p: see decode_kernels.py. The positions of a request ascend.
    oldest = tl.load(q_pos + first + m0 // R)
    newest = tl.load(q_pos + first + tl.minimum((m0 + M - 1) // R, tokens - 1))
    window = tl.load(windows + row * window_row)
    slope = p
    if ALIBI:  # of one query head it is one number, because a number for each row and slot would stay in registers
        at_slope = g + tl.arange(0, 1) if R == 1 else h
        slope = tl.load(slopes + at_slope, mask=valid if R > 1 else at_slope == g, other=0.0) * LOG2E
    is_dense = window < 0  # false, as a tensor
    full, end = 0, (count * S + N - 1) // N  # blocks that all rows see, blocks that some see
    if DENSE:
        is_dense = (window == NO_WINDOW) & (tl.load(dense + row) != 0)
        end = tl.where(is_dense, tl.minimum(end, (newest + N) // N), end)
        full = tl.where(is_dense, tl.minimum(end, (oldest + 1) // N), 0)
    row_max, row_sum = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, VP), tl.float32)
    z_max, z_sum = row_max, row_sum
    kind, keys, inverse_temperature = 0, p, slope
    if CHANGE != UNCHANGED:
        kind = tl.load(noise + b)
        if not REDRAW:
            draws = tl.full((max(NOISE_COLUMNS, 1),), -1, tl.int32)
        elif NOISE_COLUMNS:
            draws = noise_draw(oldest, tl.load(noise_period + b)) + tl.arange(0, NOISE_COLUMNS)
        else:
            draws = noise_draw(p, tl.load(noise_period + b))
        keys = noise_key(tl.load(seed + b), layer, g, draws)
        inverse_temperature = 1.0 / tl.load(temperature + t, mask=valid, other=1.0)
    if SINKS and PART != SECOND:  # as a slot without a value
        row_max = tl.load(sinks + h, mask=valid, other=0.0) * LOG2E
        row_sum = tl.full((M,), 1.0, tl.float32)
        if CHANGE == SCORES:
            z_max = (row_max + mean_noise(kind, NOISE)) * inverse_temperature
            z_sum = row_sum
        elif CHANGE == WEIGHTS:
            z_sum = tl.exp2(mean_noise(kind, NOISE) + tl.zeros((M,), tl.float32))
    if PART == SECOND:  # the output so far is a mean with a sum of 1
        row_max = tl.load(log_sums + t * G * R + h, mask=valid, other=float("-inf"))
        row_sum = tl.where(row_max > float("-inf"), 1.0, 0.0)
        at_row = o + t.to(tl.int64)[:, None] * G * R * V + h[:, None] * V
        acc = tl.load(at_row + e[None, :], mask=valid[:, None] & (e < V)[None, :], other=0.0).to(tl.float32)
        if CHANGE != UNCHANGED:
            z_max = tl.load(lse + t * G * R + h, mask=valid, other=float("-inf"))
            z_sum = tl.where(z_max > float("-inf"), 1.0, 0.0)
            if CHANGE == WEIGHTS:  # relative to row_max
                z_sum = tl.where(z_sum > 0.0, tl.exp2(z_max - finite_or_zero(row_max)), 0.0)
    if NOISE_COLUMNS:
        z_sum = tl.where(own_noise(p, oldest, tl.load(noise_period + b), NOISE_COLUMNS), z_sum[:, None], 0.0)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    if DENSE:
        row_max, row_sum, acc, z_max, z_sum = attend_blocks(
            0, full, row_max, row_sum, acc, z_max, z_sum,
            q, p, slope, factor, softcap, window, is_dense, oldest, newest,
            k, v, k_scales, v_scales, pos, table, count, kind, keys, inverse_temperature,
            S, D, DP, V, VP, N, False, ALIBI, SOFTCAP, CHANGE, NOISE, NOISE_COLUMNS, NOISE_DOT, DOT, PRECISION,
            K_PAGE, V_PAGE, QUANTIZED, K_GROUP, V_GROUP,
        )  # fmt: skip
    row_max, row_sum, acc, z_max, z_sum = attend_blocks(
        full, end, row_max, row_sum, acc, z_max, z_sum,
        q, p, slope, factor, softcap, window, is_dense, oldest, newest,
        k, v, k_scales, v_scales, pos, table, count, kind, keys, inverse_temperature,
        S, D, DP, V, VP, N, True, ALIBI, SOFTCAP, CHANGE, NOISE, NOISE_COLUMNS, NOISE_DOT, DOT, PRECISION,
        K_PAGE, V_PAGE, QUANTIZED, K_GROUP, V_GROUP,
    )  # fmt: skip
    # Loaded again, because registers that hold rows and heads over the loops would be spilled.
    m = tl.load(tiles + 6 * j + 4, volatile=True) + tl.arange(0, M)
    valid = m < tokens * R
    t, h = first + m // R, g * R + m % R
    if NOISE_COLUMNS:
        p = tl.load(q_pos + t, mask=valid, other=-1)
        z_sum = tl.sum(tl.where(own_noise(p, oldest, tl.load(noise_period + b), NOISE_COLUMNS), z_sum, 0.0), 1)
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    to = o + t.to(tl.int64)[:, None] * G * R * V + h[:, None] * V + e[None, :]
    tl.store(to, out.to(o.dtype.element_ty), mask=valid[:, None] & (e < V)[None, :])
    log_sum = row_max + safe_log2(row_sum)
    if PART == FIRST:
        tl.store(log_sums + t * G * R + h, log_sum, mask=valid)
    if CHANGE != UNCHANGED:
        log_sum = (z_max if CHANGE == SCORES else row_max) + safe_log2(z_sum)
        if PART == FIRST:
            tl.store(lse + t * G * R + h, log_sum, mask=valid)
    if UPDATE_MASS:
        weight = tl.abs(tl.load(weights + t, mask=valid, other=0.0))
        adds = (weight != 0.0) & (log_sum > float("-inf"))
        log_weight = tl.where(adds, tl.log2(tl.where(adds, weight, 1.0)) - tl.where(adds, log_sum, 0.0), float("-inf"))
        tl.store(log_weights + h * T + t, log_weight, mask=valid)
