"""Ranks that are threads of one process, so that tests need no other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.tensor_parallel import Leader, follow
from retain.kernels.ranks import abort, shared_bytes

T = TypeVar("T")
TIMEOUT = 120  # seconds


@dataclass
class Meeting:
    """What the ranks of a group share."""

    size: int
    barrier: Barrier = field(init=False)
    given: list[Any] = field(init=False)
    messages: list[Queue[Any]] = field(init=False)
    errors: list[BaseException] = field(default_factory=list)
    memory: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=TIMEOUT)
        self.given = [None] * self.size
        self.messages = [Queue() for _ in range(self.size)]
        self.memory = torch.zeros(shared_bytes(self.size), dtype=torch.uint8)

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, BrokenBarrierError):
            self.errors.append(error)
        self.barrier.abort()
        abort(self.memory)


@dataclass(frozen=True)
class ThreadRanks:
    """One of the ranks of a meeting."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    @property
    def shared_memory(self) -> Tensor | None:
        return self.meeting.memory

    def all_gather(self, x: Tensor) -> Tensor:
        try:
            self.meeting.given[self.rank] = x.clone()
            self.meeting.barrier.wait()
            given = torch.stack(self.meeting.given)
            self.meeting.barrier.wait()
        except BrokenBarrierError:
            raise next(iter(self.meeting.errors), None) or BrokenBarrierError from None
        return given

    def broadcast(self, message: Any = None) -> Any:
        if self.rank:
            return pickle.loads(self.meeting.messages[self.rank].get())
        data = pickle.dumps(message)  # as to another process: nothing is shared
        for queue in self.meeting.messages[1:]:
            queue.put(data)
        return message


def make_ranks(size: int) -> list[ThreadRanks]:
    meeting = Meeting(size)
    return [ThreadRanks(rank, meeting) for rank in range(size)]


def run_ranks(size: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """Call a function with each of `size` ranks, in threads. Returns what it returned, by rank."""
    ranks = make_ranks(size)

    def run(rank: ThreadRanks) -> T:
        try:
            return function(rank)
        except BaseException as error:
            rank.meeting.fail(error)
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in ranks]
        if errors := [error for future in futures if (error := future.exception())]:
            raise next(iter(ranks[0].meeting.errors), errors[0])
    return [future.result() for future in futures]


def lead_threads(make: Callable[[ThreadRanks], Engine], size: int) -> Engine:
    """Return an engine that leads `size` - 1 others, which end with it."""
    ranks = make_ranks(size)

    def run(rank: ThreadRanks) -> None:
        try:
            engine = make(rank)
            follow(engine.runner, engine.cache, rank)
        except BaseException as error:
            rank.meeting.fail(error)

    for rank in ranks[1:]:
        Thread(target=run, args=(rank,), daemon=True).start()
    engine = make(ranks[0])
    engine.leader = Leader(engine.cache, ranks[0])
    weakref.finalize(engine, ranks[0].broadcast)
    return engine


def errors_of(ranks: Sequence[ThreadRanks]) -> list[BaseException]:
    return ranks[0].meeting.errors
