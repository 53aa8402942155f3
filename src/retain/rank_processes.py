"""The processes of several ranks on one machine: the first is the caller's, and starts the others.

They exchange rows in shared memory where the backend can, else by torch.distributed: gloo on CPUs, NCCL on GPUs.
Messages of the first rank go through pipes, so that the others may wait for ever, and end with it.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from retain.config import Config
from retain.engine.tensor_parallel import follow
from retain.factory import build_engine
from retain.kernels.ranks import RankError, abort, shared_bytes

LOOPBACK = "127.0.0.1"
EXCHANGE_TIMEOUT = timedelta(minutes=10)  # a first step compiles kernels
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """What a rank is told when it starts: see `ProcessRanks`."""

    config: Config
    rank: int
    size: int
    port: int  # of the store by which torch.distributed begins
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
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    # ---- RankGroup -----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks gave, in the order of ranks: [size, *x.shape], on the device of x."""
        out = x.new_empty(self.size, *x.shape)
        try:
            self._group(x.device).allgather([list(out.unbind())], [x.contiguous()]).wait()
        except RuntimeError as error:
            raise RankError(self._name_ended()) from error
        return out

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has gone."""
        try:
            if self.rank:
                return pickle.loads(self._pipes[0].recv_bytes())
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)  # a pipe of its own would share tensors by files
            for pipe in self._pipes:
                pipe.send_bytes(data)
        except (OSError, EOFError) as error:
            raise RankError(self._name_ended()) from error
        return message

    # ---- the first rank ------------------------------------------------------------------------------------------

    def adopt(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Watch the processes of the other ranks: when one ends, the others must not wait for it."""
        self._processes = list(processes)
        for rank, process in enumerate(processes, 1):
            Thread(target=self._watch, args=(rank, process), name="retain-rank-watch", daemon=True).start()

    def await_start(self) -> None:
        """Return when the others have loaded their parts. Raises ValueError with what one says, and RankError."""
        for pipe in self._pipes:
            try:
                problem = pipe.recv()
            except (OSError, EOFError) as error:
                raise RankError(self._name_ended()) from error
            if problem is not None:
                raise ValueError(problem)

    def close(self) -> None:
        """End the other ranks, which are between two steps."""
        if self._is_closed:
            return
        self._is_closed = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._is_closed:
            log.error("rank %d has ended with exit status %d", rank, status)
        abort(self.shared_memory)

    def _name_ended(self) -> str:
        if self.rank:
            return "the first rank"
        ended = (f"rank {i} (exit status {p.poll()})" for i, p in enumerate(self._processes, 1) if p.poll() is not None)
        return next(ended, "another rank")

    # ---- torch.distributed ---------------------------------------------------------------------------------------

    def _group(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self._nccl

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


def start_ranks(config: Config) -> ProcessRanks:
    """Start the other ranks of a configuration, which load their parts. Returns the first. Raises OSError."""
    size = config.tensor_parallel
    file = os.memfd_create("retain-ranks")
    os.ftruncate(file, shared_bytes(size))
    store = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    num_threads = max(torch.get_num_threads() // size, 1)
    pipes = []
    processes = []
    for rank in range(1, size):
        here, there = Pipe()
        command = [sys.executable, "-m", __name__, str(there.fileno()), str(file)]
        env = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        processes.append(subprocess.Popen(command, pass_fds=(there.fileno(), file), env=env, stdin=subprocess.DEVNULL))
        there.close()
        here.send(RankSetup(config, rank, size, store.port, logging.getLogger().level))
        pipes.append(here)
    torch.set_num_threads(num_threads)
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
    setup: RankSetup = pipe.recv()
    logging.basicConfig(level=max(setup.log_level, logging.WARNING), format=f"rank {setup.rank}: %(message)s")
    store = dist.TCPStore(LOOPBACK, setup.port, None, is_master=False)
    ranks = ProcessRanks(setup.rank, setup.size, store, map_memory(file), [pipe])
    try:
        parts = build_engine(setup.config, ranks=ranks)
    except (ValueError, OSError) as error:
        with suppress(OSError):  # the first rank has found it out, and ended
            pipe.send(str(error))
        return 1
    with suppress(OSError, RankError):  # the first rank has ended
        pipe.send(None)
        follow(parts.engine.runner, parts.cache, ranks, parts.input_processor.adapters.bank)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(run_rank(Connection(int(sys.argv[1])), int(sys.argv[2])))
