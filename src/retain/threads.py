"""Helpers for threads that run beside the computing ones."""

from __future__ import annotations

import os
from contextlib import suppress


def reset_cpu_affinity() -> None:
    """Let the current thread run on any core; otherwise it inherits the one core that OpenMP bound its parent to."""
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
