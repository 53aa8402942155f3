"""Admission control: bounds the queue, the requests of one key and the choices of one request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from retain.server.config import Limits
from retain.server.openai.errors import APIError

log = logging.getLogger(__name__)
# A key may have this many times as many choices in flight as it leaves free, so that some room is always left
# (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998). One key alone gets two thirds of the room.
SHARE_OF_FREE = 2
LOG_EVERY = 100  # log the first rejection by a limit, and then every 100th


class AdmissionControl:
    """Counts the choices in flight and rejects requests beyond the limits. Used from the event loop only."""

    def __init__(self, limits: Limits, max_running_requests: int, num_keys: int = 0):
        """`num_keys`: API keys that share the server; each leaves room for the others."""
        self.limits, self.max_in_flight = limits, max_running_requests + limits.max_queued_requests
        self.num_keys = num_keys
        self.num_in_flight = 0
        self.closed = False  # set while the server drains
        self.num_rejected: Counter[str] = Counter()  # by name of the limit
        self._in_flight_by_key: Counter[str] = Counter()
        self._mean_duration_s = 1.0

    def check(self, key_name: str, num_choices: int) -> None:
        """Raise APIError unless `num_choices` choices of a key would be admitted now."""
        if self.closed:
            raise APIError(503, "the server is shutting down", headers={"Retry-After": "5"})
        limits = self.limits
        if num_choices > limits.max_choices:
            self._log_rejection("max_choices")
            raise APIError(400, f"prompts times n is {num_choices}: at most {limits.max_choices} on this server", "n")
        of_key, per_key = self._in_flight_by_key[key_name], limits.max_requests_per_key
        if per_key is not None and of_key + num_choices > per_key:
            self._log_rejection("max_requests_per_key")
            raise self._rate_limit_error(
                f"this key has {of_key} requests in flight, its limit is {per_key}: retry later"
            )
        free = self.max_in_flight - self.num_in_flight
        # An idle server takes any request, and the first choice of a key needs no more than a place.
        is_shared = self.num_keys > 1 and self.num_in_flight and of_key + num_choices > 1
        if is_shared and of_key + num_choices > SHARE_OF_FREE * (free - num_choices):
            self._log_rejection("share_of_key")
            raise self._rate_limit_error(f"this key has {of_key} requests in flight and must leave room: retry later")
        if num_choices > free:
            self._log_rejection("max_queued_requests")
            raise self._rate_limit_error(f"the queue is full: {self.num_in_flight} requests are in flight, retry later")

    @contextmanager
    def admit(self, key_name: str, num_choices: int) -> Iterator[None]:
        """Admit `num_choices` choices of a key for the duration of the context. Raises APIError."""
        self.check(key_name, num_choices)
        self.num_in_flight += num_choices
        self._in_flight_by_key[key_name] += num_choices
        admitted_at = monotonic()
        try:
            yield
        finally:
            self.num_in_flight -= num_choices
            self._in_flight_by_key[key_name] -= num_choices
            if not self._in_flight_by_key[key_name]:
                del self._in_flight_by_key[key_name]
            self._mean_duration_s += 0.1 * (monotonic() - admitted_at - self._mean_duration_s)

    def _log_rejection(self, limit: str) -> None:
        self.num_rejected[limit] += 1
        count = self.num_rejected[limit]
        if count % LOG_EVERY == 1:
            log.warning("request rejected by %s (%d in total), %d choices in flight", limit, count, self.num_in_flight)

    def _rate_limit_error(self, message: str) -> APIError:
        """Build a 429. Retry-After is the mean duration of a request: about when one in flight ends."""
        retry_after = str(max(1, round(self._mean_duration_s)))
        return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": retry_after})
