"""The cores of threads: of those that compute, and of those that run beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def share_of_cores(cores: Sequence[int], index: int, num_shares: int) -> Sequence[int]:
    """Return the cores of share `index`. Shares do not overlap where there is a core for each."""
    size = max(len(cores) // num_shares, 1)
    start = index % num_shares * size % len(cores)
    return cores[start : start + size]


def available_cores() -> Sequence[int]:
    """Return the cores that the current thread may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def process_cores() -> Sequence[int]:
    """Return the cores of the process. The current thread may use them, whatever core OpenMP had bound it to."""
    if os.environ.get("OMP_PROC_BIND", "false").lower() != "false":
        reset_cpu_affinity()
    return available_cores()


def keep_on_cores(cores: Sequence[int]) -> None:
    """Keep the current thread, and those that it starts, on these cores, where the system can."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, cores)


def openmp_environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the variables of a process whose OpenMP has a thread on each of these cores. It reads them once."""
    places = ",".join(f"{{{core}}}" for core in cores)
    return {"OMP_PLACES": places, "OMP_NUM_THREADS": str(len(cores)), "OMP_PROC_BIND": "true"}


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep the current thread and OpenMP's on these cores. Call it before torch is imported: OpenMP reads them then."""
    os.environ |= openmp_environment(cores)
    reset_cpu_affinity()


def reset_cpu_affinity() -> None:
    """Let the current thread run on every core that `pin_to_cores` named, or on any.

    Otherwise it inherits the one core that OpenMP bound its parent to.
    """
    places = os.environ.get("OMP_PLACES", "")
    named = re.findall(r"\d+", places) if re.fullmatch(r"\{\d+\}(,\{\d+\})*", places) else ()
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, [int(core) for core in named] or range(os.cpu_count() or 1))


def without_stop_iteration(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function for a thread whose StopIteration is a RuntimeError, as in a coroutine.

    Before Python 3.12 asyncio's futures refuse that exception, and who awaits the thread's result waits for ever.
    """

    def run() -> T:
        try:
            return function()
        except StopIteration as error:
            raise RuntimeError("the function raised StopIteration") from error

    return run
