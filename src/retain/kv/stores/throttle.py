"""A limit on the bytes that a store reads per second."""

from __future__ import annotations

import threading
from time import monotonic, sleep


class Throttle:
    """Delays reads so that they stay below `rate` bytes per second (None: no limit)."""

    def __init__(self, rate: int | None):
        self.rate = rate
        self._lock = threading.Lock()
        self._next_read_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait until the limit allows a read of so many bytes."""
        if not self.rate:
            return
        with self._lock:
            self._next_read_at = ready = max(monotonic(), self._next_read_at) + num_bytes / self.rate
        sleep(max(ready - monotonic(), 0))
