"""Admission control: bounds the requests in flight, their choices and the bytes of their bodies, and those of a key."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from math import inf
from time import monotonic
from types import TracebackType

from retain.server.config import Limits
from retain.server.openai.errors import APIError

log = logging.getLogger(__name__)
# A key may have this many times as many choices in flight as it leaves free, so that some room is always left
# (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998). One key alone gets two thirds of the room.
SHARE_OF_FREE = 2
LOG_EVERY = 100  # log the first rejection by a limit, and then every 100th


class InFlight:
    """How much of a bounded quantity is in flight: in total and of each key."""

    def __init__(self) -> None:
        self.total = 0
        self.by_key: Counter[str] = Counter()

    def add(self, key_name: str, amount: int) -> None:
        """Add to what a key has in flight, or take a negative amount from it."""
        self.total += amount
        self.by_key[key_name] += amount
        if not self.by_key[key_name]:
            del self.by_key[key_name]


class AdmissionControl:
    """Counts what is in flight and rejects requests beyond the limits. Used from the event loop only."""

    def __init__(self, limits: Limits, max_running_requests: int, num_keys: int = 0):
        """`num_keys`: API keys that share the server; each leaves room for the others."""
        self.limits = limits
        self.max_in_flight = max_running_requests + limits.max_queued_requests
        self.max_bytes = max(limits.max_in_flight_bytes, limits.max_body_size)  # an idle server takes any legal body
        self.num_keys = num_keys
        self.choices = InFlight()
        self.body_bytes = InFlight()
        self.closed = False  # set while the server drains
        self.num_rejected: Counter[str] = Counter()  # by name of the limit
        self.mean_duration_s = 1.0

    @property
    def num_in_flight(self) -> int:
        """Choices in flight. A request whose body is still read counts as one."""
        return self.choices.total

    def open(self, key_name: str, deadline: float = inf) -> RequestAdmission:
        """Return the admission of a new request of a key, which has nothing in flight yet.

        `deadline`: when its response must end, by the event loop's clock.
        """
        return RequestAdmission(self, key_name, deadline)

    def check_open(self) -> None:
        """Raise APIError while the server drains."""
        if self.closed:
            raise APIError(503, "the server is shutting down", headers={"Retry-After": "5"})

    def check_choices(self, key_name: str, num_choices: int) -> None:
        """Raise APIError unless `num_choices` more choices of a key may be in flight."""
        limits = self.limits
        if num_choices > limits.max_choices:
            self._log_rejection("max_choices")
            raise APIError(400, f"prompts times n is {num_choices}: at most {limits.max_choices} on this server", "n")
        of_key = self.choices.by_key[key_name]
        per_key = limits.max_requests_per_key
        if per_key is not None and of_key + num_choices > per_key:
            raise self._reject(
                "max_requests_per_key", f"this key has {of_key} requests in flight, its limit is {per_key}"
            )
        if self._exceeds_share(self.choices, self.max_in_flight, key_name, num_choices, min_share=1):
            raise self._reject("share_of_key", f"this key has {of_key} requests in flight and must leave room")
        if self.num_in_flight + num_choices > self.max_in_flight:
            raise self._reject("max_queued_requests", f"the queue is full: {self.num_in_flight} requests are in flight")

    def check_bytes(self, key_name: str, num_bytes: int) -> None:
        """Raise APIError unless `num_bytes` more bytes of bodies of a key may be in flight."""
        of_key = self.body_bytes.by_key[key_name]
        in_flight = self.body_bytes.total
        if self._exceeds_share(self.body_bytes, self.max_bytes, key_name, num_bytes, self.limits.max_body_size):
            raise self._reject(
                "share_of_bytes", f"the bodies of this key in flight have {of_key} bytes and must leave room"
            )
        if in_flight + num_bytes > self.max_bytes:
            raise self._reject("max_in_flight_bytes", f"the bodies of requests in flight have {in_flight} bytes")

    def _exceeds_share(self, in_flight: InFlight, max_total: int, key_name: str, amount: int, min_share: int) -> bool:
        """Return whether a key would leave too little of `max_total` for others. An idle server takes any request.

        `min_share`: what a key may have in any case, while there is room.
        """
        of_key = in_flight.by_key[key_name] + amount
        if self.num_keys <= 1 or not in_flight.total or of_key <= min_share:
            return False
        return of_key > SHARE_OF_FREE * (max_total - in_flight.total - amount)

    def _log_rejection(self, limit: str) -> None:
        self.num_rejected[limit] += 1
        count = self.num_rejected[limit]
        if count % LOG_EVERY == 1:
            in_flight = (self.choices.total, self.body_bytes.total)
            log.warning(
                "request rejected by %s (%d in total), %d choices and %d bytes in flight", limit, count, *in_flight
            )

    def _reject(self, limit: str, reason: str) -> APIError:
        """Count and build a 429. Retry-After is the mean duration of a request: about when one in flight ends."""
        self._log_rejection(limit)
        retry_after = str(max(1, round(self.mean_duration_s)))
        message = f"{reason}: retry later"
        return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": retry_after})


class RequestAdmission:
    """What one request has in flight: its choices and the bytes of its body. The end of the context returns all."""

    def __init__(self, control: AdmissionControl, key_name: str, deadline: float):
        self.control = control
        self.key_name = key_name
        self.deadline = deadline
        self.trace_headers: Mapping[str, str] = {}  # of the call
        self.num_choices = self.num_bytes = 0
        self._work_began_at: float | None = None

    def admit(self, num_choices: int) -> None:
        """Count the request as `num_choices` choices from now on, instead of those it counted before.

        Raises APIError where they exceed a limit; then it counts as before. A server that drains admits no request
        that has nothing in flight.
        """
        control = self.control
        key_name = self.key_name
        if not self.num_choices:
            control.check_open()
        control.choices.add(key_name, -self.num_choices)  # not twice
        try:
            control.check_choices(key_name, num_choices)
            self.num_choices = num_choices
        finally:
            control.choices.add(key_name, self.num_choices)

    def begin_work(self) -> None:
        """Count the request's time from now on: that of work tells refused clients when to come again."""
        self._work_began_at = monotonic()

    def hold_bytes(self, num_bytes: int) -> None:
        """Count the request's body as `num_bytes` bytes from now on. Raises APIError where they exceed a limit."""
        control = self.control
        key_name = self.key_name
        control.body_bytes.add(key_name, -self.num_bytes)
        try:
            control.check_bytes(key_name, num_bytes)
            self.num_bytes = num_bytes
        finally:
            control.body_bytes.add(key_name, self.num_bytes)

    def __enter__(self) -> RequestAdmission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        control = self.control
        control.choices.add(self.key_name, -self.num_choices)
        control.body_bytes.add(self.key_name, -self.num_bytes)
        self.num_choices = self.num_bytes = 0
        if self._work_began_at is not None:
            control.mean_duration_s += 0.1 * (monotonic() - self._work_began_at - control.mean_duration_s)
