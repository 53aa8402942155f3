"""Kernels of short convolutions and of linear attention. kernels/reference/linear_attention.py is the definition.

A kernel reads slots that the step's own tokens may overwrite, so they are written in a launch after it. Tokens whose
slot is in the trash page are not written.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
