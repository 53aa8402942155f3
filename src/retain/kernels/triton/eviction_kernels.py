"""Kernels that find the slots to evict first, one program for each list of slots.

A list is dealt into bins: slot i is in bin i % BINS. One pass finds the lowest key of each bin. Then n times the lowest
bin gives the next victim, and only its slots are read again: DEEP is as many or more.
"""

# mypy: ignore-errors
# Triton's language, not Python's.

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
def lowest_above(key, lowest, lows, bins, b):
    """Return the lowest keys of bins, where that of bin b is now the next one above `lowest` among `key`."""
    return tl.where(bins == b, tl.min(tl.where(key > lowest, key, FAR), 0), lows)


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
        lowest, b = find_lowest(lows, bins, BINS)
        i = b + deep
        p = tl.load(pos + i, mask=i < count, other=0)
        value = tl.load(priority + i, mask=i < count, other=0.0)
        key = eviction_key(value, p, i, i < count, first_evictable, last_evictable)
        tl.store(places + row * n + k, tl.max(tl.where(key == lowest, i, -1), 0).to(tl.int64))
        lows = lowest_above(key, lowest, lows, bins, b)
