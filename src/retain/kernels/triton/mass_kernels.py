"""The kernel that adds the attention weights of decode tiles to the masses of slots.

attention_decode has stored the weights, each block's relative to a maximum. They are normalized by the `lse` of
`merge_splits` and added up, so no score is computed twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.triton.page_layout import TABLE_ADDRESSES
from retain.kernels.triton.quantized_loads import find_slots
from retain.kernels.triton.softmax import NO_WINDOW


@triton.jit(do_not_specialize=[*TABLE_ADDRESSES, "max_slots", "num_blocks"])
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
    if (tl.load(windows + row * window_row) != NO_WINDOW) | ((fades == 1.0) & (scored == 0.0)):
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
