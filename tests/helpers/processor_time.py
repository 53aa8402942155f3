"""Bounds on work: they tell a pass over some data from one that a damaged or growing count repeats for minutes."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Check that the block takes at most so much processor time of this thread, however busy the machine is."""
    start = time.thread_time()
    try:
        yield
    finally:
        assert time.thread_time() - start < seconds


class Times(NamedTuple):
    """Seconds of processor time of the threads of a server that runs in this process."""

    event_loop: float
    engine: float
    preparation: float  # all others that Python started: those that parse and prepare bodies


class ServerClocks:
    """Reads the processor time of the threads of a server that runs in this process.

    `event_loop`, `engine`: the identifiers of these threads.
    """

    def __init__(self, event_loop: int, engine: int):
        self._event_loop = event_loop
        self._engine = engine

    def read(self) -> Times:
        """Return the processor time until now. The caller's own does not count."""
        shared = {self._event_loop, self._engine}
        others = {thread.ident for thread in threading.enumerate()} - shared - {threading.get_ident(), None}
        return Times(_read(self._event_loop), _read(self._engine), sum(_read(ident) for ident in others if ident))


def _read(ident: int) -> float:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:  # the thread has ended
        return 0.0


@contextmanager
def without_collections() -> Iterator[None]:
    """Run no collection of cycles: it visits all objects of the process, in the thread that happens to start it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
