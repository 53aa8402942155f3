"""Ranks that are threads of one process, so that tests need no other."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.tensor_parallel import Driver, run_worker
from retain.kernels.ranks import abort, shared_bytes

T = TypeVar("T")
TIMEOUT = 120  # seconds


@dataclass
class ThreadGroup:
    """What the ranks of a group share."""

    size: int
    barrier: Barrier = field(init=False)
    given: list[Any] = field(init=False)
    messages: list[Queue[Any]] = field(init=False)
    errors: list[BaseException] = field(default_factory=list)
    memory: Tensor = field(init=False)
    workers: list[Thread] = field(default_factory=list)

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
    """One of the ranks of a threads."""

    rank: int
    threads: ThreadGroup

    @property
    def size(self) -> int:
        return self.threads.size

    @property
    def shared_memory(self) -> Tensor | None:
        return self.threads.memory

    def all_gather(self, x: Tensor) -> Tensor:
        try:
            self.threads.given[self.rank] = x.clone()
            self.threads.barrier.wait()
            given = torch.stack(self.threads.given)
            self.threads.barrier.wait()
        except BrokenBarrierError:
            raise next(iter(self.threads.errors), None) or BrokenBarrierError from None
        return given

    def least(self, number: int) -> int:
        return int(self.all_gather(torch.tensor(number)).min())

    def is_shared(self, value: object) -> bool:
        self.threads.given[self.rank] = value
        self.threads.barrier.wait()
        is_shared = all(other == value for other in self.threads.given)
        self.threads.barrier.wait()
        return is_shared

    def connect(self, device: torch.device) -> None:
        """Do nothing: threads share all."""

    def name_ended(self) -> str:
        return str(next(iter(self.threads.errors), "another rank"))

    def abort(self) -> None:
        self.threads.barrier.abort()
        abort(self.threads.memory)

    def broadcast(self, message: Any = None) -> Any:
        if self.rank:
            return pickle.loads(self.threads.messages[self.rank].get())
        data = pickle.dumps(message)  # as to another process: nothing is shared
        for queue in self.threads.messages[1:]:
            queue.put(data)
        return message


def make_ranks(size: int) -> list[ThreadRanks]:
    threads = ThreadGroup(size)
    return [ThreadRanks(rank, threads) for rank in range(size)]


def run_ranks(size: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """Call a function with each of `size` ranks, in threads. Returns what it returned, by rank."""
    ranks = make_ranks(size)

    def run(rank: ThreadRanks) -> T:
        try:
            return function(rank)
        except BaseException as error:
            rank.threads.fail(error)
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in ranks]
        if errors := [error for future in futures if (error := future.exception())]:
            raise next(iter(ranks[0].threads.errors), errors[0])
    return [future.result() for future in futures]


def lead_threads(make: Callable[[ThreadRanks], Engine], size: int) -> Engine:
    """Return an engine that leads `size` - 1 others, which end with it."""
    ranks = make_ranks(size)

    def run(rank: ThreadRanks) -> None:
        try:
            engine = make(rank)
            run_worker(engine.runner, engine.cache, rank)
            engine.cache.prefix_cache.close_offloader()
        except BaseException as error:
            rank.threads.fail(error)

    ranks[0].threads.workers = [Thread(target=run, args=(rank,), daemon=True) for rank in ranks[1:]]
    for worker in ranks[0].threads.workers:
        worker.start()
    engine = make(ranks[0])
    engine.driver = Driver(engine.cache, ranks[0])
    weakref.finalize(engine, ranks[0].broadcast)
    return engine


def end_workers(engine: Engine) -> None:
    """End the other ranks of an engine, if there are any, and close their tiers."""
    if engine.driver:
        engine.driver.group.broadcast()
        for worker in engine.driver.group.threads.workers:  # type: ignore[attr-defined]  # those of this file
            worker.join(TIMEOUT)
