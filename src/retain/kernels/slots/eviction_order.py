"""The order in which slots are evicted, as one integer for each slot, so that all backends agree to the slot."""

from __future__ import annotations

import torch
from torch import Tensor

PROTECTED = 2**32  # replaces the priority of a protected slot; larger than the rank of any float
HIGHEST_BITS = 0x7FFFFFFF  # of the float that ranks above all others, infinity included
LAST_POSITION = 2**31 - 1


def sum_columns(mass: Tensor) -> Tensor:
    """Return the sums of masses [..., C, S] over columns, [..., S], added in their order, and NaN as one number.

    The order of `torch.sum` depends on the number of slots, and on the device. The sign of a NaN depends on the
    processor, and says whether it ranks below or above all other numbers: here it is positive.
    """
    first, *others = mass.unbind(-2)
    for column in others:
        first = first + column
    return torch.where(first.isnan(), torch.nan, first)


def protect(priority: Tensor, pos: Tensor, first_evictable: Tensor, last_evictable: Tensor) -> Tensor:
    """Return priorities float32 [..., S] by which protected slots go last, in the order of their positions.

    For lists of which each has a range of its own: positions before `first_evictable` or after `last_evictable`, both
    int64 [..., 1], are protected.
    """
    is_protected = (pos < first_evictable) | (pos > last_evictable)
    bits = priority.float().contiguous().view(torch.int32)
    return bits.masked_fill(is_protected, HIGHEST_BITS).view(torch.float32)


def eviction_key(priority: Tensor, pos: Tensor, first_evictable: int | Tensor, last_evictable: int | Tensor) -> Tensor:
    """Return int64 keys [..., S] of slots with priority float32 and position int32 [..., S]; the lowest goes first.

    Holes go first, in the order of their places. Positions before `first_evictable` or after `last_evictable` go
    last. Among equal priorities the oldest position goes first, so no two keys are equal.
    """
    bits = priority.float().contiguous().view(torch.int32).long()
    rank = 2**31 + torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # positive, in the order of the floats
    rank = torch.where((pos < first_evictable) | (pos > last_evictable), PROTECTED, rank)
    return torch.where(pos < 0, torch.arange(-pos.shape[-1], 0, device=pos.device), (rank << 30) + pos)
