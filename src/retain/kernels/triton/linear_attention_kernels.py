"""Kernels of short convolutions and of linear attention. kernels/reference/linear_attention.py is the definition.

A kernel reads slots that the step's own tokens may overwrite, so they are written in a launch after it. Tokens whose
slot is in the trash page are not written.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # positions that a program of linear attention computes together; divides pages


@triton.jit
def find_slots(pos, table, count, position, S: tl.constexpr, SP: tl.constexpr):
    """Return the slots int64 [N] with these positions [N], each in a table (pointers [N]) of `count` pages [N].

    It is -1 where there is none.
    """
    place = tl.arange(0, SP)[None, :]
    found = count.to(tl.int64) * 0 - 1
    for i in range(0, tl.max(count, 0)):
        page = tl.load(table + i, mask=i < count, other=0).to(tl.int64)[:, None]
        held = tl.load(pos + page * S + place, mask=(i < count)[:, None] & (place < S), other=-1)
        slot = tl.max(tl.where((held == position[:, None]) & (held >= 0), page * S + place, -1), 1)
        found = tl.where(found < 0, slot, found)
    return found


@triton.jit(do_not_specialize=["num_requests", "tokens"])
def convolve(
    x, x_row, out, weight, bias, k, v, pos,
    pages, page_row, page_head, counts, count_row, count_head,
    requests, num_requests, positions, tokens,
    W: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Convolve T of the rows x [tokens, G (K + V)]: N channels of one head."""
    C: tl.constexpr = K + V  # channels of a head
    t, g = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    c = tl.program_id(2) * N + tl.arange(0, N)
    r = tl.arange(0, R)
    begin = tl.load(requests + 6 * r + 2, mask=r < num_requests, other=0)
    size = tl.load(requests + 6 * r + 3, mask=r < num_requests, other=0)
    is_own = (t[:, None] >= begin[None, :]) & (t[:, None] < (begin + size)[None, :])  # [T, R]
    valid = tl.max(is_own.to(tl.int32), 1) > 0  # padding tokens are of no request
    row = tl.load(requests + 6 * r + 1, mask=r < num_requests, other=0)
    row = tl.sum(tl.where(is_own, row[None, :], 0), 1)
    begin = tl.sum(tl.where(is_own, begin[None, :], 0), 1)
    p = tl.load(positions + t, mask=valid, other=0)
    table = pages + row.to(tl.int64) * page_row + g * page_head
    needs_slots = valid & (t - begin < W - 1)
    count = tl.load(counts + row * count_row + g * count_head, mask=needs_slots, other=0)
    channel = g * C + c
    y = tl.zeros((T, N), tl.float32)
    if BIAS:
        y += tl.load(bias + channel, mask=c < C, other=0.0)[None, :]
    for i in tl.static_range(W):
        source = t - (W - 1 - i)
        is_fresh = valid & (source >= begin)
        at = source.to(tl.int64)[:, None] * x_row + channel[None, :]
        value = tl.load(x + at, mask=is_fresh[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        if i < W - 1:
            slot = find_slots(pos, table, tl.where(is_fresh, 0, count), p - (W - 1 - i), S, SP)[:, None]
            page, place = slot // S, slot % S
            is_key, is_value = (slot >= 0) & (c < K)[None, :], (slot >= 0) & ((c >= K) & (c < C))[None, :]
            value += tl.load(k + page * K_PAGE + place * K + c[None, :], mask=is_key, other=0.0)
            value += tl.load(v + page * V_PAGE + place * V + (c - K)[None, :], mask=is_value, other=0.0)
        y = y + tl.load(weight + channel * W + i, mask=c < C, other=0.0)[None, :] * value
    to = out + t.to(tl.int64)[:, None] * G * C + channel[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < C)[None, :])


@triton.jit
def find_pages(pos, table, count, position, S: tl.constexpr):
    """Return the pages int64 whose last slots have a position, each in a table (a pointer) of `count` pages.

    All have one shape. It is -1 where there is none.
    """
    found = count.to(tl.int64) * 0 - 1
    for i in range(0, tl.max(count)):
        page = tl.load(table + i, mask=i < count, other=0).to(tl.int64)
        held = tl.load(pos + page * S + S - 1, mask=i < count, other=-1)
        found = tl.where((held == position) & (held >= 0), page, found)
    return found


@triton.jit
def point_to_state(k, v, page, d, e, V: tl.constexpr, F: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr):
    """Return pointers to row d and column e of a state, and whether they are numbers of one.

    `page` has the row; pages before 1 have none. A page has F rows in K, and the next F rows in V.
    """
    place = d % (2 * F)
    row = tl.where(place < F, k + page * K_PAGE + place * V, v + page * V_PAGE + (place - F) * V)
    return row + e, (page > 0) & (e < V)


@triton.jit
def sum_products(a, b):
    """Return the sum over chunks c of the products of a [C, M, N] and b [C, N, K], each of three of tf32: [M, K]."""
    return tl.sum(tl.dot(a, b, input_precision="tf32x3"), 0)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), to float32's precision where e^x is small, too."""
    y = tl.exp(tl.minimum(x, 20.0))
    z = 1.0 + y
    # The second factor takes back how 1 + y was rounded (Goldberg 1991, theorem 4).
    small = tl.where(z == 1.0, y, tl.log(z) * (y / tl.where(z == 1.0, 1.0, z - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["slot_head", "state_slot_head"])
def attend_linearly(
    qkv, qkv_row, gates, gates_row, decay, time_bias, skip, min_step, max_step,
    out, decays,  # out [T, H, V], decays float32 [T, H]
    k, u, pos, pages, page_row, page_head, counts, count_row, count_head, slots, slot_head, slot_token,
    state_k, state_v, state_pos, state_pages, state_page_row, state_page_head,
    state_counts, state_count_row, state_count_head, state_slots, state_slot_head, state_slot_token,
    requests, positions,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, N: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    F: tl.constexpr, PARTS: tl.constexpr, STATE_K_PAGE: tl.constexpr, STATE_V_PAGE: tl.constexpr,
    RULE: tl.constexpr,
):  # fmt: skip
    """Compute the fresh tokens of one request and one value head: VB of its V columns. RULE is "delta" or "mamba2".

    Rows are the tokens at ROWS positions, fresh or from slots. The last one folds them into the state, which is written
    at page ends alone: so what is in registers does not grow with pages. A sum is always over all rows of such a block,
    so bits do not depend on where steps cut the text.

    Keys, queries and states are C chunks of N of their D numbers, so that each warp multiplies its own. Writes u and
    states, but no positions: other columns find their slots by these.
    """
    b, h = tl.program_id(0), tl.program_id(1)
    row, begin, count = tl.load(requests + 6 * b + 1), tl.load(requests + 6 * b + 2), tl.load(requests + 6 * b + 3)
    if count == 0:
        return
    row = row.to(tl.int64)
    e = tl.program_id(2) * VB + tl.arange(0, VB)
    j = tl.arange(0, ROWS)
    d = tl.arange(0, C)[:, None, None] * N + tl.arange(0, N)[None, None, :]  # [C, 1, N]
    in_state = tl.arange(0, C)[:, None, None] * N + tl.arange(0, N)[None, :, None]  # [C, N, 1]: rows
    columns = e[None, None, :]
    has_column = (e < V)[None, :]
    position = tl.load(positions + begin)
    base = position // F * F
    num_old = position - base
    head = h * PARTS + in_state // (2 * F)  # each row's
    table = state_pages + row * state_page_row + head * state_page_head
    has_state = (in_state < D) & (base > 0)
    num_pages = tl.load(state_counts + row * state_count_row + head * state_count_head, mask=has_state, other=0)
    page = find_pages(state_pos, table, num_pages, base - 1, F)
    from_state, is_number = point_to_state(state_k, state_v, page, in_state, columns, V, F, STATE_K_PAGE, STATE_V_PAGE)
    state = tl.load(from_state, mask=is_number, other=0.0)  # [C, N, VB]
    num_pages = tl.load(counts + row * count_row + h * count_head)
    table = pages + row * page_row + h * page_head + j * 0
    log_decay, bias = tl.load(decay + h), tl.load(time_bias + h)
    start = log_decay * 0.0  # the sum of log decays that the state has
    for i in range(0, (num_old + count + ROWS - 1) // ROWS):
        n0 = i * ROWS  # tokens since the page end before the step
        t = (begin - num_old + n0 + j).to(tl.int64)
        slot = find_slots(pos, table, tl.where(n0 + j < num_old, num_pages, 0), base + n0 + j, S, SP)
        is_old, is_fresh = slot >= 0, (t >= begin) & (t < begin + count)
        first, end = tl.minimum(tl.maximum(num_old - n0, 0), ROWS), tl.minimum(num_old + count - n0, ROWS)
        at_k = slot // S * K_PAGE + slot % S * (D + 8)
        at_u = (slot // S * V_PAGE + slot % S * V)[:, None] + e[None, :]
        sums = tl.load(k + at_k + D, mask=is_old, other=0.0)  # of log decays since the last page end
        us = tl.load(u + at_u, mask=is_old[:, None] & has_column, other=0.0)  # [ROWS, VB]
        keys = tl.load(k + at_k[None, :, None] + d, mask=is_old[None, :, None] & (d < D), other=0.0)
        tl.debug_barrier()  # slots are overwritten only when all threads have read them
        is_row = is_fresh[None, :, None] & (d < D)
        from_q = qkv + t[None, :, None] * qkv_row + h // R * D + d
        queries = tl.load(from_q, mask=is_row, other=0.0).to(tl.float32)
        keys += tl.load(from_q + H // R * D, mask=is_row, other=0.0).to(tl.float32)  # [C, ROWS, N]
        from_v = qkv + t[:, None] * qkv_row + 2 * (H // R) * D + h * V + e[None, :]
        values = tl.load(from_v, mask=is_fresh[:, None] & has_column, other=0.0).to(tl.float32)
        a = tl.load(gates + t * gates_row + h, mask=is_fresh, other=0.0).to(tl.float32)
        lengths = softplus(a + bias)
        if RULE == "mamba2":
            lengths = tl.minimum(tl.maximum(lengths, min_step), max_step)
        steps = log_decay * lengths
        last = tl.where(first == 0, start, tl.sum(tl.where(j == first - 1, sums, 0.0), 0))
        for n in range(first, end):
            last += tl.sum(tl.where(j == n, steps, 0.0), 0)
            sums = tl.where(j == n, last, sums)
        sums = tl.where(j < end, sums, last)
        weight = tl.exp(sums - start)[:, None]
        transposed = tl.permute(keys, (0, 2, 1))
        if RULE == "mamba2":
            us += lengths[:, None] * values  # of rows that are fresh
        else:
            beta = tl.load(gates + t * gates_row + H + h, mask=is_fresh, other=0.0).to(tl.float32)
            beta = (1.0 / (1.0 + tl.exp(-beta)))[:, None]
            is_before = j[:, None] < j[None, :]
            fade = tl.exp(tl.where(is_before, sums[None, :] - sums[:, None], 0.0))  # [earlier, later]
            products = tl.where(is_before, fade * sum_products(keys, transposed), 0.0)
            rest = values - weight * sum_products(keys, state)
            for n in range(first, end):
                column = tl.sum(tl.where((j == n)[None, :], products, 0.0), 1)
                found = beta * (rest - tl.sum(column[:, None] * us, 0)[None, :])
                us = tl.where((j == n)[:, None], found, us)
        is_seen = j[None, :] <= j[:, None]
        fade = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))  # [later, earlier]
        products = tl.where(is_seen, fade * sum_products(queries, transposed), 0.0)
        o = weight * sum_products(queries, state) + tl.dot(products, us, input_precision="tf32x3")
        if RULE == "mamba2":
            o += tl.load(skip + h) * values
        to = out + (t * H + h)[:, None] * V + e[None, :]
        tl.store(to, o.to(out.dtype.element_ty), mask=is_fresh[:, None] & has_column)
        if tl.program_id(2) == 0:
            tl.store(decays + t * H + h, sums, mask=is_fresh)
        slot = tl.load(slots + h * slot_head + t * slot_token, mask=is_fresh, other=0).to(tl.int64)
        at_u = (slot // S * V_PAGE + slot % S * V)[:, None] + e[None, :]
        tl.store(u + at_u, us, mask=(slot >= S)[:, None] & has_column)
        if end == ROWS:
            faded = tl.exp(last - sums)[None, None, :] * transposed
            repeated = tl.broadcast_to(us[None, :, :], (C, ROWS, VB))
            state = tl.exp(last - start) * state + tl.dot(faded, repeated, input_precision="tf32x3")
            start = last
        if (n0 + end) % F == 0:
            start = log_decay * 0.0
            at = head * state_slot_head + (begin - num_old + n0 + ROWS - 1).to(tl.int64) * state_slot_token
            page = tl.load(state_slots + at, mask=in_state < D, other=0).to(tl.int64) // F
            to_state, is_number = point_to_state(
                state_k, state_v, page, in_state, columns, V, F, STATE_K_PAGE, STATE_V_PAGE
            )
            tl.store(to_state, state, mask=is_number)


@triton.jit(do_not_specialize=["slot_head", "state_slot_head", "tokens"])
def write_keys(
    qkv, qkv_row, decays, k, pos, mass, slots, slot_head, slot_token,
    state_pos, state_slots, state_slot_head, state_slot_token, positions, tokens,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, S: tl.constexpr, K_PAGE: tl.constexpr, F: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write T of the keys, with their sums of log decays, and the positions of tokens and states, of one value head."""
    t, h = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1)
    valid, t = t < tokens, t.to(tl.int64)
    p = tl.load(positions + t, mask=valid, other=-1)
    slot = tl.load(slots + h * slot_head + t * slot_token, mask=valid, other=0).to(tl.int64)
    is_written = slot >= S
    page, place = slot // S, slot % S
    d = tl.arange(0, N)[None, :]
    at = qkv + (t * qkv_row)[:, None] + (H // R + h // R) * D + d
    row = tl.load(at, mask=is_written[:, None] & (d < D), other=0.0).to(tl.float32)
    row = tl.where(d == D, tl.load(decays + t * H + h, mask=is_written, other=0.0)[:, None], row)
    tl.store(k + (page * K_PAGE + place * (D + 8))[:, None] + d, row, mask=is_written[:, None] & (d < D + 8))
    tl.store(pos + slot, p, mask=is_written)
    c = tl.arange(0, CP)[None, :]
    to = mass + (page[:, None] * C + c) * S + place[:, None]
    tl.store(to, tl.zeros((T, CP), tl.float32), mask=is_written[:, None] & (c < C))
    for part in tl.static_range(PARTS):
        at_slot = (h * PARTS + part) * state_slot_head + t * state_slot_token
        slot = tl.load(state_slots + at_slot, mask=valid, other=0).to(tl.int64)
        tl.store(state_pos + slot, p, mask=slot >= F)
