"""Ranks: the processes that compute one model together. The names are those of torch.distributed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """What an operation needs of the other ranks. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank: 0 schedules."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks gave, in the order of ranks: [size, *x.shape], on the device of x."""
