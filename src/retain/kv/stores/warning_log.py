"""Warnings that repeat: each kind is logged when it first happens, and counted afterwards."""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock

# Errors of disks and memory explain themselves. Any other exception is logged with its traceback.
EXPECTED_ERRORS = (OSError, MemoryError)


class WarningLog:
    """Log one warning for each kind of problem. Threads may share it."""

    def __init__(self, logger: logging.Logger):
        self.logger = logger
        self.counts = Counter[str]()
        self._lock = Lock()

    def warn(self, problem: str, error: Exception | None = None) -> None:
        """Count a problem, and log it if it is the first of its kind.

        `problem` names the store and the action that failed. The kind is that text with the type of the error.
        """
        kind = f"{problem}: {type(error).__name__}" if error else problem
        with self._lock:
            self.counts[kind] += 1
            if self.counts[kind] > 1:
                return
        unexpected = error if error and not isinstance(error, EXPECTED_ERRORS) else None
        detail = f": {error}" if str(error or "") else ""
        self.logger.warning("%s%s (more of the same are counted, not logged)", kind, detail, exc_info=unexpected)

    def close(self) -> None:
        """Log how often each problem happened that happened more than once."""
        with self._lock:
            counts = self.counts
            self.counts = Counter()
        for kind, count in counts.items():
            if count > 1:
                self.logger.warning("%s: %d times in all", kind, count)
