"""Which slots go first when some must: one number for each, the same in every backend. Policies are not known here."""

from __future__ import annotations

import torch
from torch import Tensor

PROTECTED = 2**32  # in the place of a priority; above all of them


def eviction_key(priority: Tensor, pos: Tensor, sinks: int, last_evictable: int) -> Tensor:
    """int64 [..., S] for slots of priority float32 and position int32 [..., S]: the lowest goes first, none are equal.

    Holes are below everything, as they lie; those before position `sinks` or behind `after` above everything; older
    before newer where priorities are equal.
    """
    bits = priority.float().contiguous().view(torch.int32).long()
    number = 2**31 + torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # positive, in the order of the floats
    number = torch.where((pos < sinks) | (pos > last_evictable), PROTECTED, number)
    return torch.where(pos < 0, torch.arange(-pos.shape[-1], 0, device=pos.device), (number << 30) + pos)
