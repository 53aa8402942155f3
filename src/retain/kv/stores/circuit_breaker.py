"""A circuit breaker: a store that fails is left alone for a while, then probed."""

from __future__ import annotations

import threading
from time import monotonic


class CircuitBreaker:
    """Closed: requests may pass. A failure opens it for `delay` seconds; afterwards a probe that succeeds closes it.

    Each failure doubles the delay, from `first` to at most `longest` seconds. Only a complete load resets it: a store
    that answers probes may still be too slow for loads.
    """

    def __init__(self, first: float = 1.0, longest: float = 60.0):
        self.first = first
        self.longest = longest
        self.delay = first
        self.num_openings = 0
        self._lock = threading.Lock()
        self._probe_at: float | None = None  # None: closed

    @property
    def is_open(self) -> bool:
        """Whether requests must not pass."""
        return self._probe_at is not None

    @property
    def seconds_until_probe(self) -> float | None:
        """Seconds until a probe may pass; None while it is closed."""
        probe_at = self._probe_at
        return None if probe_at is None else max(probe_at - monotonic(), 0.0)

    def record_failure(self) -> None:
        """Refuse requests for the delay, and double it. A failure while requests are refused changes nothing."""
        with self._lock:
            if self._probe_at is not None and monotonic() < self._probe_at:
                return  # requests that were under way when it opened
            self._probe_at = monotonic() + self.delay
            self.delay = min(2 * self.delay, self.longest)
            self.num_openings += 1

    def close(self) -> None:
        """Let requests pass again, after a probe."""
        self._probe_at = None

    def reset_delay(self) -> None:
        """Begin with the shortest delay again, after a complete load."""
        self.delay = self.first
