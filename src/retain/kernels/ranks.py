"""Ranks: the processes that compute one model together. The names are those of torch.distributed.

Ranks of one machine may share memory, by which a backend in C++ exchanges rows without a system call. Its 64-byte lines
are: one that is not 0 when a rank has gone; a counter of each rank; then two parts of CHUNK_BYTES for each rank.
"""

from __future__ import annotations

from mmap import mmap
from typing import Protocol

from torch import Tensor

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


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that so many ranks share."""
    return LINE_BYTES * (1 + size) + 2 * size * CHUNK_BYTES


def abort(memory: Tensor | mmap) -> None:
    """Let no rank wait any more, now or later, by the bytes that all map: one has ended."""
    memory[0] = 1
