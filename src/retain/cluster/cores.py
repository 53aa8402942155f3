"""The place of a replica among those of its machine: its number, and its cores."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from retain.files import make_private_folder


def claim_index(folder: Path) -> tuple[int, IO[bytes]]:
    """Claim the lowest number that no other process has, and return it with the file whose lock holds it.

    The system releases the lock with the process, however it ends. Raises OSError.
    """
    make_private_folder(folder)
    for index in itertools.count():
        lock = (folder / f"{index}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return index, lock
    raise AssertionError("there is always a free number")


def share_of_cores(cores: Sequence[int], index: int, num_shares: int) -> Sequence[int]:
    """Return the cores of share `index`. Shares do not overlap where there is a core for each."""
    size = max(len(cores) // num_shares, 1)
    start = index % num_shares * size % len(cores)
    return cores[start : start + size]


def available_cores() -> Sequence[int]:
    """Return the cores that the current thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)
