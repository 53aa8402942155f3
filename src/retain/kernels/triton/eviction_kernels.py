"""Kernels that find the slots to evict first, one program for each list of slots.

A list is dealt into bins: slot i is in bin i % BINS. One pass finds the lowest key of each bin. Then n times the lowest
bin gives the next victim, and only its slots are read again: DEEP is as many or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**63 - 1)  # above every key
FIRST_HOLE = tl.constexpr(-(2**30))  # the key of a hole at place 0


@triton.jit
def eviction_key(value, p, i, is_slot, first_evictable, last_evictable):
    """Return the keys of slots with these priorities and positions at places i; eviction_order.py defines them."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    rank = 2147483648 + tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    rank = tl.where((p < first_evictable) | (p > last_evictable), 4294967296, rank)
    key = tl.where(p < 0, FIRST_HOLE + i, rank * 1073741824 + p)
    return tl.where(is_slot, key, FAR)


@triton.jit
def find_lowest(lows, bins, BINS: tl.constexpr):
    """Return the lowest key of all bins, and its bin."""
    lowest = tl.min(lows, 0)
    return lowest, tl.min(tl.where(lows == lowest, bins, BINS), 0)


@triton.jit
def lowest_above(key, lowest, lows, bins, lowest_bin):
    """Return the lowest keys of bins, where that of `lowest_bin` is now the next one above `lowest` among `key`."""
    return tl.where(bins == lowest_bin, tl.min(tl.where(key > lowest, key, FAR), 0), lows)


@triton.jit(do_not_specialize=["first_evictable", "last_evictable", "n"])
def select_victims(
    priority, pos, lengths, places, width, first_evictable, last_evictable, n, BINS: tl.constexpr, DEEP: tl.constexpr
):
    """Write the places of the n lowest keys of one list, in order."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(lengths + row)
    priority += row * width
    pos += row * width
    bins, deep = tl.arange(0, BINS), tl.arange(0, DEEP) * BINS
    lows = tl.full((BINS,), FAR, tl.int64)
    for first in range(0, count, BINS):
        i = first + bins
        p = tl.load(pos + i, mask=i < count, other=0)
        value = tl.load(priority + i, mask=i < count, other=0.0)
        lows = tl.minimum(lows, eviction_key(value, p, i, i < count, first_evictable, last_evictable))
    for k in range(n):
        lowest, lowest_bin = find_lowest(lows, bins, BINS)
        i = lowest_bin + deep
        p = tl.load(pos + i, mask=i < count, other=0)
        value = tl.load(priority + i, mask=i < count, other=0.0)
        key = eviction_key(value, p, i, i < count, first_evictable, last_evictable)
        tl.store(places + row * n + k, tl.max(tl.where(key == lowest, i, -1), 0).to(tl.int64))
        lows = lowest_above(key, lowest, lows, bins, lowest_bin)


@triton.jit
def load_slots(pos, mass, table, i, count, is_by_mass, S: tl.constexpr, C: tl.constexpr):
    """Return numbers, positions and priorities of the slots at places i of a table, of which `count` are used."""
    page = tl.load(table + i // S, mask=i < count, other=0).to(tl.int64)
    slot = page * S + i % S
    p = tl.load(pos + slot, mask=i < count, other=0)
    first = mass + page * (C * S) + i % S
    is_needed = i < tl.where(is_by_mass, count, 0)  # by position, the oldest of equal priorities goes first
    value = tl.load(first, mask=is_needed, other=0.0)
    for c in tl.static_range(1, C):
        value += tl.load(first + c * S, mask=is_needed, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # NaN, whose sign is the processor's
    return slot, p, bits.to(tl.float32, bitcast=True)


STRIDES = ["page_row", "page_layer", "page_head", "hole_row", "hole_layer", "hole_head"]
PARTS_OF_ONE_UPLOAD = ["rows", "layers", "slots_used", "evictable", "by_mass"]  # aligned by chance


@triton.jit(do_not_specialize=["n", *STRIDES, *PARTS_OF_ONE_UPLOAD])
def punch(
    pos, mass, pages, page_row, page_layer, page_head, rows, layers, slots_used, evictable, by_mass,
    holes, hole_row, hole_layer, hole_head, n,
    G: tl.constexpr, S: tl.constexpr, C: tl.constexpr, BINS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Turn the n slots with the lowest keys of one list into holes, and write their numbers, in order.

    Whether a slot that is read again is a hole by then does not matter: either key is below that of the last victim.
    """
    b, m, g = tl.program_id(1), tl.program_id(0) // G, tl.program_id(0) % G
    count = tl.load(slots_used + b * tl.num_programs(0) + tl.program_id(0))
    row, layer = tl.load(rows + b).to(tl.int64), tl.load(layers + m).to(tl.int64)
    first_evictable, last_evictable = tl.load(evictable + 2 * b), tl.load(evictable + 2 * b + 1)
    is_by_mass = tl.load(by_mass + b) == 1
    table = pages + row * page_row + layer * page_layer + g * page_head
    to = holes + row * hole_row + layer * hole_layer + g * hole_head
    bins, deep = tl.arange(0, BINS), tl.arange(0, DEEP) * BINS
    lows = tl.full((BINS,), FAR, tl.int64)
    for first in range(0, count, BINS):
        i = first + bins
        slot, p, value = load_slots(pos, mass, table, i, count, is_by_mass, S, C)
        lows = tl.minimum(lows, eviction_key(value, p, i, i < count, first_evictable, last_evictable))
    for k in range(n):
        lowest, lowest_bin = find_lowest(lows, bins, BINS)
        i = lowest_bin + deep
        slot, p, value = load_slots(pos, mass, table, i, count, is_by_mass, S, C)
        key = eviction_key(value, p, i, i < count, first_evictable, last_evictable)
        victim = tl.max(tl.where(key == lowest, slot, 0), 0)
        tl.store(to + k, victim.to(tl.int32))
        tl.store(pos + victim, -1)
        lows = lowest_above(key, lowest, lows, bins, lowest_bin)
