"""Bounds on work: they tell a pass over some data from one that a damaged or growing count repeats for minutes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Check that the block takes at most so much processor time of this thread, however busy the machine is."""
    start = time.thread_time()
    try:
        yield
    finally:
        assert time.thread_time() - start < seconds
