"""Kernels that prepare a step: tokens that only the device knows yet, and the slots of fresh tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from retain.kernels.api import NO_WINDOW

_NO_WINDOW = tl.constexpr(NO_WINDOW)


@triton.jit(do_not_specialize=["tokens"])
def insert_pending_tokens(input_ids, sources, sampled, tokens, T: tl.constexpr):
    """Write sampled ids over those of pending tokens, T fresh tokens in a program (see kernels/pending_tokens.py)."""
    t = tl.program_id(0) * T + tl.arange(0, T)
    source = tl.load(sources + t, mask=t < tokens, other=-1)
    is_pending = source >= 0
    token = tl.load(sampled + source, mask=is_pending, other=0)
    tl.store(input_ids + t, tl.maximum(token, 0), mask=is_pending)


@triton.jit(
    do_not_specialize=[
        "slots", "hole_indices", "tokens", "page_row", "page_layer", "page_head", "window_row", "base_row",
        "capacity_row", "hole_row", "hole_layer", "hole_head",
    ]
)  # fmt: skip
def map_slots(
    slots, rows, positions, last_positions, hole_indices, tokens,
    pages, page_row, page_layer, page_head, windows, window_row, ring_base, base_row, capacity, capacity_row,
    holes, hole_row, hole_layer, hole_head,
    G: tl.constexpr, S: tl.constexpr, T: tl.constexpr, HOLES: tl.constexpr, KEEPS_LAST: tl.constexpr,
):  # fmt: skip
    """Give the slots [L, G, tokens] of T of the fresh tokens in one head of a layer; see kernels/slots/slot_rule.py.

    Tokens of padding requests have position -1 and get slot 0.
    """
    t = tl.program_id(0) * T + tl.arange(0, T)
    layer, g = tl.program_id(1) // G, tl.program_id(1) % G
    valid = t < tokens
    p = tl.load(positions + t, mask=valid, other=-1)
    row = tl.load(rows + t, mask=valid, other=0).to(tl.int64)
    size = tl.load(capacity + row * capacity_row + layer)
    place = (p - tl.load(ring_base + row * base_row + layer)) % size
    place = tl.where(place < 0, place + size, place)
    is_written = p >= 0
    if KEEPS_LAST:
        is_written &= p + size > tl.load(last_positions + t, mask=valid, other=-1)
    at = pages + row * page_row + layer * page_layer + g * page_head + place // S
    slot = tl.load(at, mask=is_written, other=0) * S + place % S
    if HOLES:
        i = tl.load(hole_indices + t, mask=valid, other=-1)
        fills_hole = is_written & (i >= 0) & (tl.load(windows + row * window_row + layer) == _NO_WINDOW)
        at = holes + row * hole_row + layer * hole_layer + g * hole_head + i
        slot = tl.where(fills_hole, tl.load(at, mask=fills_hole, other=0), slot)
    tl.store(slots + tl.program_id(1).to(tl.int64) * tokens + t, tl.where(is_written, slot, 0), mask=valid)
