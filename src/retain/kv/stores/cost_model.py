"""Whether to load tokens from a store or to compute them, by measured rates."""

from __future__ import annotations

import logging
from math import inf

log = logging.getLogger(__name__)


class LoadCostModel:
    """Running averages of tokens computed per second, and of bytes read per second by store."""

    def __init__(self) -> None:
        self.compute_rate: float | None = None
        self.read_rates: dict[str, float] = {}
        self._slow_stores = set[str]()  # stores that a warning was logged for

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Average in the rate of a step; the newest one weighs half."""
        rate = num_tokens / seconds
        self.compute_rate = rate if self.compute_rate is None else (self.compute_rate + rate) / 2

    def record_read(self, store: str, num_bytes: int, seconds: float) -> None:
        """Average in the rate of a read from a store; the newest one weighs half."""
        rate = num_bytes / seconds
        self.read_rates[store] = (self.read_rates.get(store, rate) + rate) / 2

    def compute_seconds(self, num_tokens: int) -> float | None:
        """Return the seconds that computing so many tokens takes; None before anything was computed."""
        return None if self.compute_rate is None else num_tokens / self.compute_rate

    def should_load(
        self, bytes_by_store: dict[str, int], num_tokens: int, latency: float = 0.0, time_limit: float = inf
    ) -> bool:
        """Whether reading these bytes takes less time than computing the tokens, and less than `time_limit`.

        `latency` seconds pass before the first byte. Unknown rates cost nothing. Each refusal raises
        the rates of its stores by 2 %, so that a store that was slow once is tried again.
        """
        known = {s: n / self.read_rates[s] for s, n in bytes_by_store.items() if s in self.read_rates}
        compute_seconds = self.compute_seconds(num_tokens)
        if latency + sum(known.values()) < min(inf if compute_seconds is None else compute_seconds, time_limit):
            return True
        slowest = max(known, key=lambda s: known[s], default=None)
        if self.compute_rate and slowest and slowest not in self._slow_stores:
            self._slow_stores.add(slowest)
            log.warning(
                "tier %s is slow: it reads %.1f MB/s, and computing %.0f tokens/s is sooner done (logged once)",
                slowest,
                self.read_rates[slowest] / 1e6,
                self.compute_rate,
            )
        self.read_rates |= {s: 1.02 * self.read_rates[s] for s in known}
        return False
