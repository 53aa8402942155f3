"""Ranks that are threads of one process, so that tests need no other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TIMEOUT = 120  # seconds


@dataclass
class Meeting:
    """What all ranks of a group share."""

    size: int
    barrier: Barrier = field(init=False)
    given: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=TIMEOUT)
        self.given = [None] * self.size


@dataclass(frozen=True)
class ThreadRanks:
    """One of the ranks of a meeting."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x.clone()))

    def broadcast(self, message: Any = None) -> Any:
        return self._exchange(message)[0]

    def _exchange(self, value: Any) -> list[Any]:
        self.meeting.given[self.rank] = value
        self.meeting.barrier.wait()
        given = list(self.meeting.given)
        self.meeting.barrier.wait()
        return given


def run_ranks(size: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """Call a function with each of `size` ranks, in threads. Returns what it returned, by rank."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadRanks(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception())]
    causes = [error for error in errors if type(error).__name__ != "BrokenBarrierError"]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures]
