"""Helpers for threads that run beside the computing ones."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress


def pin_to_cores(cores: Sequence[int]) -> None:
    """Keep the current thread and OpenMP's on these cores. Call it before torch is imported: OpenMP reads them then."""
    places = ",".join(f"{{{core}}}" for core in cores)
    os.environ |= {"OMP_PLACES": places, "OMP_NUM_THREADS": str(len(cores)), "OMP_PROC_BIND": "true"}
    reset_cpu_affinity()


def reset_cpu_affinity() -> None:
    """Let the current thread run on every core that `pin_to_cores` named, or on any.

    Otherwise it inherits the one core that OpenMP bound its parent to.
    """
    places = os.environ.get("OMP_PLACES", "")
    named = re.findall(r"\d+", places) if re.fullmatch(r"\{\d+\}(,\{\d+\})*", places) else ()
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, [int(core) for core in named] or range(os.cpu_count() or 1))
