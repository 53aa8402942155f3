"""The processes of several ranks on one machine: the first is the caller's, and starts the others.

They exchange rows in shared memory where the backend can, else by torch.distributed: gloo on CPUs, NCCL on GPUs.
Messages of the first rank go through pipes, so that the others may wait for ever, and end with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import mkdtemp
from threading import Event, Thread
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retain.config import Config
from retain.engine.tensor_parallel import run_worker
from retain.factory import build_engine
from retain.kernels.ranks import RankError, abort, shared_bytes
from retain.kv.journal import DivergedError
from retain.threads import keep_on_cores, openmp_environment, process_cores, share_of_cores

LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT = timedelta(minutes=10)  # a first step compiles kernels
CONNECT_TIMEOUT = timedelta(seconds=30)  # for other ranks, which have loaded their parts
POLL_TIME = 20e-6  # seconds, between two looks whether an exchange is over, or all are
NAME_TIMEOUT = 1.0  # seconds, for a rank that no longer answers to have an exit status
END_TIMEOUT = 60.0  # seconds, for other ranks to write what is on its way to their tiers
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told when it starts: see `ProcessRanks`."""

    config: Config
    rank: int
    size: int
    folder: str  # of the store by which torch.distributed begins
    cores: Sequence[int]
    log_level: int


class ProcessRanks:
    """A rank of several that are processes, as `RankGroup` wants it."""

    def __init__(self, rank: int, size: int, folder: str, memory: mmap.mmap, pipes: Sequence[Connection]):
        """`pipes` go to the other ranks, or to the first; `memory` is what all map, `folder` one that all know."""
        self.rank = rank
        self.size = size
        self.shared_memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.on_end: list[Callable[[], None]] = []  # called by another thread when a rank ends
        self._folder = folder
        self._memory = memory
        self._pipes = pipes
        self._processes: Sequence[subprocess.Popen[bytes]] = ()
        self._watchers: list[Thread] = []
        self._cores: Sequence[int] = ()
        self._is_closed = Event()

    # ---- RankGroup -----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks gave, in the order of ranks: [size, *x.shape], on the device of x."""
        out = x.new_empty(self.size, *x.shape)
        try:
            group = self._gloo if x.device.type == "cpu" else self._nccl
            work = group.allgather([list(out.unbind())], [x.contiguous()])
            while x.device.type == "cpu" and not work.is_completed() and not self._memory[0]:
                sleep(POLL_TIME)
            if self._memory[0]:
                raise RankError(self.name_ended())
            work.wait()
        except RuntimeError as error:
            raise RankError(self.name_ended()) from error
        return out

    def connect(self, device: torch.device) -> None:
        """Prepare `all_gather` on a device, with all ranks. Raises RankError where one has ended."""
        self.all_gather(torch.zeros(1, device=device))

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has ended."""
        try:
            if self.rank:
                return pickle.loads(self._pipes[0].recv_bytes())
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # `send` would open a file for each tensor
            for pipe in self._pipes:
                pipe.send_bytes(data)
        except (OSError, EOFError) as error:
            raise RankError(self.name_ended()) from error
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
            raise RankError(self.name_ended()) from error
        return bool(self.broadcast(all(other == value for other in found)))

    def abort(self) -> None:
        """Let all exchanges end, now and later: the other ranks end."""
        abort(self._memory)

    def name_ended(self) -> str:
        """Return which rank has ended, if that is known within a moment."""
        if self.rank:
            return "the first rank"
        for _ in range(int(NAME_TIMEOUT / 0.01)):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    return f"rank {rank} (exit status {process.returncode})"
            sleep(0.01)
        return "another rank"

    # ---- the first rank ------------------------------------------------------------------------------------------

    @property
    def process_ids(self) -> list[int]:
        """The processes of the other ranks, on the first."""
        return [process.pid for process in self._processes]

    def adopt(self, processes: Sequence[subprocess.Popen[bytes]], cores: Sequence[int]) -> None:
        """Watch the processes of the other ranks: when one ends, the others must not wait for it.

        `cores` are those of this process when it is alone again.
        """
        self._processes = processes
        self._cores = cores
        for rank, process in enumerate(processes, 1):
            args = rank, process, self._memory, self._is_closed, self.on_end  # not `self`: freed, it closes its pipes
            self._watchers.append(Thread(target=_watch, args=args, name="retain-rank-watch", daemon=True))
            self._watchers[-1].start()

    def await_start(self) -> None:
        """Return when the others have loaded their parts. Raises ValueError with what one says, and RankError."""
        self._receive_all()

    def close(self) -> None:
        """End the other ranks."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with suppress(RankError):
            self.broadcast()  # a process that was forked from this one may hold the pipes open
        self.abort()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT)
            process.kill()
        for watcher in self._watchers:
            watcher.join()
        keep_on_cores(self._cores)
        with suppress(OSError):
            shutil.rmtree(self._folder)

    def _receive_all(self) -> list[int]:
        """Return a number of each other rank. Raises ValueError with the text of one that says why it ends."""
        try:
            found = [pipe.recv() for pipe in self._pipes]
        except (OSError, EOFError) as error:
            raise RankError(self.name_ended()) from error
        for answer in found:
            if isinstance(answer, str):
                raise ValueError(answer)
        return found

    @cached_property
    def _store(self) -> dist.Store:
        store = dist.FileStore(f"{self._folder}/store", self.size)
        store.set_timeout(CONNECT_TIMEOUT)
        return store

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


def _watch(
    rank: int,
    process: subprocess.Popen[bytes],
    memory: mmap.mmap,
    is_closed: Event,
    on_end: Sequence[Callable[[], None]],
) -> None:
    status = process.wait()
    if status and not is_closed.is_set():
        log.error("rank %d has ended with exit status %d", rank, status)
    abort(memory)
    for callback in on_end if not is_closed.is_set() else ():
        callback()


def _watch_first(pipe: Connection, memory: mmap.mmap) -> None:
    """Abort exchanges when the first rank has ended, which may have been in one."""
    poll = select.poll()
    poll.register(pipe.fileno(), 0)  # only that the other end is closed
    poll.poll()
    abort(memory)


def start_ranks(config: Config) -> ProcessRanks:
    """Start the other ranks of a configuration, which load their parts. Returns the first. Raises OSError."""
    size = config.tensor_parallel
    file = os.memfd_create("retain-ranks")
    os.ftruncate(file, shared_bytes(size))
    folder = mkdtemp(prefix="retain-ranks-")
    cores = process_cores()
    path = os.pathsep.join(filter(None, sys.path))  # what this process can import, and not its current folder
    pipes = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            own = share_of_cores(cores, rank, size)
            here, there = Pipe()
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(there.fileno()), str(file)],
                    pass_fds=(there.fileno(), file),
                    env=os.environ | openmp_environment(own) | {"PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # no signal of a terminal: this process ends them
                )
            )
            there.close()
            pipes.append(here)
            here.send(RankSetup(config, rank, size, folder, own, log.getEffectiveLevel()))
        ranks = ProcessRanks(0, size, folder, map_memory(file), pipes)
    except BaseException:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    ranks.adopt(processes, cores)
    keep_on_cores(share_of_cores(cores, 0, size))
    return ranks


def map_memory(file: int) -> mmap.mmap:
    """Map a file that other ranks map, too, and close it."""
    memory = mmap.mmap(file, os.fstat(file).st_size)
    os.close(file)
    return memory


def run_rank(pipe: Connection, file: int) -> int:
    """Load a part of a model, and compute what the first rank says. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal, or of a service: the first rank drains, and ends
        signal.signal(number, signal.SIG_IGN)
    setup: RankSetup = pipe.recv()
    keep_on_cores(setup.cores)
    logging.basicConfig(level=max(setup.log_level, logging.WARNING), format=f"rank {setup.rank}: %(message)s")
    memory = map_memory(file)
    Thread(target=_watch_first, args=(pipe, memory), name="retain-rank-watch", daemon=True).start()
    ranks = ProcessRanks(setup.rank, setup.size, setup.folder, memory, [pipe])
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
    except DivergedError as error:
        log.error("%s", error)
        return 1
    finally:
        shutil.rmtree(setup.folder, ignore_errors=True)  # where the first rank has ended in another way
    return 0


if __name__ == "__main__":
    sys.exit(run_rank(Connection(int(sys.argv[1])), int(sys.argv[2])))
