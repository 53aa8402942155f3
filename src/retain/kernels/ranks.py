"""Ranks: the processes that compute one model together. The names are those of torch.distributed.

Ranks of one machine may share memory, by which a backend in C++ exchanges rows without a system call. Its 64-byte lines
are: one that is not 0 when a rank has gone; a counter of each rank; then two parts of CHUNK_BYTES for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from retain.types import Ints

T = TypeVar("T", Tensor, Ints)
CHUNK_BYTES = 4 * 2**20  # that a rank writes before it waits for others; no row is longer
LINE_BYTES = 64


class RankError(ChildProcessError):
    """Raised where another rank has ended: nothing more can be computed."""

    def __init__(self, which: str = "another rank"):
        super().__init__(f"{which} has ended: nothing more can be computed")


class ProcessGroup(Protocol):
    """What an operation needs of the other ranks. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank: 0 schedules."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def shared_memory(self) -> Tensor | None:
        """Memory that all ranks map, uint8 [shared_bytes(size)], at first zeros; None where they share none."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks gave, in the order of ranks: [size, *x.shape], on the device of x.

        Raises RankError where a rank has gone.
        """


class KVHeads:
    """Which of a layer's kv heads a rank has: all of them, in this class. Other ranks have none, or the same ones."""

    def num_of_all(self, num_own: int) -> int:
        """Return how many heads a layer has on all ranks, where this one has so many."""
        return num_own

    def select(self, x: T, dim: int = 1) -> T:
        """Return of what all heads have, along a dimension, what this rank's have."""
        return x

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return for all heads, along a dimension, what ranks have for their own. All ranks call it."""
        return x

    def largest(self, x: Ints) -> Ints:
        """Return for the place of each own head [M, G] the largest number that a rank has there; x [M, all heads]."""
        return x


ALL_HEADS = KVHeads()


@dataclass(frozen=True)
class RankHeads(KVHeads):
    """A part of each layer's kv heads. The last ranks repeat the last head where they do not divide.

    `num_query_heads` is that of all ranks, `num_own` this one's.
    """

    group: ProcessGroup
    num_query_heads: int
    num_own: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process makes of it, which has heads of its own."""
        return KVHeads, ()

    def num_of_all(self, num_own: int) -> int:
        """Return how many heads a layer has on all ranks: as many query heads read each."""
        return self.num_query_heads * num_own // self.num_own

    def select(self, x: T, dim: int = 1) -> T:
        """Return what this rank's heads have."""
        own = self._places(x.shape[dim])[self.group.rank]
        found: T = x[(slice(None),) * dim + (own,)]
        return found

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return what all ranks have, without the heads that are repeated."""
        found = self.group.all_gather(x.byte() if x.dtype is torch.bool else x)
        return torch.cat(list(found), dim).narrow(dim, 0, self.num_of_all(x.shape[dim])).to(x.dtype)

    def largest(self, x: Ints) -> Ints:
        """Return the largest numbers that ranks have at the places of heads."""
        found: Ints = x[:, self._places(x.shape[1])].max(1)
        return found

    def _places(self, num_of_all: int) -> Ints:
        """Return the heads of each rank, [ranks, G]."""
        num_own = -(-num_of_all // self.group.size)
        found = np.arange(self.group.size * num_own, dtype=np.int32).clip(max=num_of_all - 1)
        return found.reshape(self.group.size, num_own)


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that so many ranks share."""
    return LINE_BYTES * (1 + size) + 2 * size * CHUNK_BYTES


def abort(memory: Tensor | mmap) -> None:
    """Let no rank wait any more, now or later, by the bytes that all map: one has ended."""
    memory[0] = 1
