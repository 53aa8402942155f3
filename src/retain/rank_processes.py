"""The processes of several ranks on one machine: the first is the caller's, and starts the others.

They exchange rows in shared memory where the backend can, else by torch.distributed: gloo on CPUs, NCCL on GPUs.
Messages of the first rank go through pipes, so that the others may wait for ever, and end with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retain.config import Config
from retain.engine.tensor_parallel import run_worker
from retain.factory import build_engine
from retain.kernels.ranks import RankError, abort, shared_bytes
from retain.threads import openmp_environment, process_cores, share_of_cores

LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT = timedelta(minutes=10)  # a first step compiles kernels
END_TIMEOUT = 60.0  # seconds, for other ranks to write what is on its way to their tiers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told when it starts: see `ProcessRanks`."""

    config: Config
    rank: int
    size: int
    port: int  # of the store by which torch.distributed begins
    cores: Sequence[int]
    log_level: int


class ProcessRanks:
    """A rank of several that are processes, as `RankGroup` wants it."""

    def __init__(self, rank: int, size: int, store: dist.Store, memory: Tensor, pipes: Sequence[Connection]):
        """`pipes` go to the other ranks, or to the first; `memory` is what all map."""
        self.rank = rank
        self.size = size
        self.shared_memory = memory
        self._store = store
        self._pipes = pipes
        self._processes: Sequence[subprocess.Popen[bytes]] = ()
        self._is_closed = Event()

    # ---- RankGroup -----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks gave, in the order of ranks: [size, *x.shape], on the device of x."""
        out = x.new_empty(self.size, *x.shape)
        group = self._gloo if x.device.type == "cpu" else self._nccl
        try:
            group.allgather([list(out.unbind())], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise RankError(self._name_ended()) from error
        return out

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has ended."""
        try:
            if self.rank:
                return pickle.loads(self._pipes[0].recv_bytes())
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # `send` would open a file for each tensor
            for pipe in self._pipes:
                pipe.send_bytes(data)
        except (OSError, EOFError) as error:
            raise RankError(self._name_ended()) from error
        return message

    def least(self, number: int) -> int:
        """Return the least of the numbers that all ranks give. Raises ValueError with why a rank has none."""
        if self.rank:
            self._pipes[0].send(number)
        else:
            number = min([number, *self._receive_all()])
        return int(self.broadcast(number))

    def is_shared(self, value: object) -> bool:
        """Return whether all ranks give this value. Raises RankError where a rank has ended."""
        try:
            if self.rank:
                self._pipes[0].send(value)
                return bool(self.broadcast())
            found = [pipe.recv() for pipe in self._pipes]
        except (OSError, EOFError) as error:
            raise RankError(self._name_ended()) from error
        return bool(self.broadcast(all(other == value for other in found)))

    def abort(self) -> None:
        """Let all exchanges end, now and later: the other ranks end."""
        abort(self.shared_memory)

    # ---- the first rank ------------------------------------------------------------------------------------------

    @property
    def process_ids(self) -> list[int]:
        """The processes of the other ranks, on the first."""
        return [process.pid for process in self._processes]

    def adopt(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Watch the processes of the other ranks: when one ends, the others must not wait for it."""
        self._processes = processes
        for rank, process in enumerate(processes, 1):
            args = rank, process, self.shared_memory, self._is_closed  # not `self`: when it is freed, its pipes close
            Thread(target=_watch, args=args, name="retain-rank-watch", daemon=True).start()

    def await_start(self) -> None:
        """Return when the others have loaded their parts. Raises ValueError with what one says, and RankError."""
        self._receive_all()

    def close(self) -> None:
        """End the other ranks."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self.abort()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT)
            process.kill()

    def _receive_all(self) -> list[int]:
        """Return a number of each other rank. Raises ValueError with the text of one that says why it ends."""
        try:
            found = [pipe.recv() for pipe in self._pipes]
        except (OSError, EOFError) as error:
            raise RankError(self._name_ended()) from error
        for answer in found:
            if isinstance(answer, str):
                raise ValueError(answer)
        return found

    def _name_ended(self) -> str:
        if self.rank:
            return "the first rank"
        ended = (f"rank {i} (exit status {p.poll()})" for i, p in enumerate(self._processes, 1) if p.poll() is not None)
        return next(ended, "another rank")

    # ---- torch.distributed ---------------------------------------------------------------------------------------

    @cached_property
    def _gloo(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = EXCHANGE_TIMEOUT
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), self.rank, self.size, options)

    @cached_property
    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = EXCHANGE_TIMEOUT
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self.rank, self.size, options)


def _watch(rank: int, process: subprocess.Popen[bytes], memory: Tensor, is_closed: Event) -> None:
    status = process.wait()
    if not is_closed.is_set():
        log.error("rank %d has ended with exit status %d", rank, status)
    abort(memory)


def start_ranks(config: Config) -> ProcessRanks:
    """Start the other ranks of a configuration, which load their parts. Returns the first. Raises OSError."""
    size = config.tensor_parallel
    file = os.memfd_create("retain-ranks")
    os.ftruncate(file, shared_bytes(size))
    store = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    cores = process_cores()
    pipes = []
    processes = []
    for rank in range(1, size):
        own = share_of_cores(cores, rank, size)
        here, there = Pipe()
        command = [sys.executable, "-m", __name__, str(there.fileno()), str(file)]
        env = os.environ | openmp_environment(own)
        processes.append(subprocess.Popen(command, pass_fds=(there.fileno(), file), env=env, stdin=subprocess.DEVNULL))
        there.close()
        here.send(RankSetup(config, rank, size, store.port, own, log.getEffectiveLevel()))
        pipes.append(here)
    ranks = ProcessRanks(0, size, store, map_memory(file), pipes)
    ranks.adopt(processes)
    return ranks


def map_memory(file: int) -> Tensor:
    """Map a file that other ranks map, too, and close it. Returns its bytes."""
    size = os.fstat(file).st_size
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    os.close(file)
    return memory


def run_rank(pipe: Connection, file: int) -> int:
    """Load a part of a model, and compute what the first rank says. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or of a service: the first rank drains, and ends
        signal.signal(number, signal.SIG_IGN)
    setup: RankSetup = pipe.recv()
    with suppress(OSError, AttributeError):  # where processes cannot be kept on cores
        os.sched_setaffinity(0, setup.cores)
    logging.basicConfig(level=max(setup.log_level, logging.WARNING), format=f"rank {setup.rank}: %(message)s")
    store = dist.TCPStore(LOOPBACK, setup.port, None, is_master=False)
    ranks = ProcessRanks(setup.rank, setup.size, store, map_memory(file), [pipe])
    try:
        try:
            parts = build_engine(setup.config, ranks=ranks)
        except RankError:
            raise
        except (ValueError, OSError) as error:
            pipe.send(str(error))
            return 1
        try:
            pipe.send(0)
            run_worker(parts.engine.runner, parts.cache, ranks, parts.input_processor.adapters.bank)
        finally:
            parts.cache.prefix_cache.close_offloader()
    except (RankError, BrokenPipeError):
        log.info("the first rank has ended")
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(Connection(int(sys.argv[1])), int(sys.argv[2])))
