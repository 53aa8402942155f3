"""How much is let in: the queue's bound, what one key may have at once, sizes, times. Not known here: answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from retain.server.openai.errors import APIError


@dataclass(frozen=True)
class Limits:
    """None: none. An answer counts once, whoever asked for it; `n=4` are four."""

    max_queued_requests: int = 256  # answers that wait, besides those that run
    max_requests_per_key: int | None = None  # answers of one key at once
    max_output_tokens: int | None = None  # of an answer, at most
    max_choices: int = 16  # of one request: prompts times n
    max_body_size: int = 8 * 2**20  # bytes
    upload_timeout: float = 30.0  # for the body to come
    request_timeout: float = 600.0  # from its arrival to its end
    max_pin_s: float = 3600.0


class AdmissionControl:
    """Lets answers in, up to `rows` that run and the queue's bound."""

    def __init__(self, limits: Limits, max_running_requests: int):
        self.limits, self.max_in_flight = limits, max_running_requests + limits.max_queued_requests
        self.num_in_flight = 0
        self.closed = False  # draining: nobody new
        self._in_flight_by_key: Counter[str] = Counter()
        self._mean_duration_s = 1.0  # seconds that an answer took

    @contextmanager
    def admit(self, key_name: str, num_choices: int) -> Iterator[None]:
        """So many answers for a key. Raises Refused."""
        if self.closed:
            raise APIError(503, "the server is going away", headers={"Retry-After": "5"})
        if num_choices > self.limits.max_choices:
            raise APIError(400, f"{num_choices} answers at once: at most {self.limits.max_choices}", "n")
        most = self.limits.max_requests_per_key
        if most is not None and self._in_flight_by_key[key_name] + num_choices > most:
            raise self._rate_limit_error(
                f"this key has {self._in_flight_by_key[key_name]} answers in the making, of {most} that it may have"
            )
        if self.num_in_flight + num_choices > self.max_in_flight:
            raise self._rate_limit_error(f"the queue is full: {self.num_in_flight} answers are in the making")
        self.num_in_flight += num_choices
        self._in_flight_by_key[key_name] += num_choices
        began = monotonic()
        try:
            yield
        finally:
            self.num_in_flight -= num_choices
            self._in_flight_by_key[key_name] -= num_choices
            if not self._in_flight_by_key[key_name]:
                del self._in_flight_by_key[key_name]
            self._mean_duration_s += 0.1 * (monotonic() - began - self._mean_duration_s)

    def _rate_limit_error(self, message: str) -> APIError:
        """When about one of those inside will have ended."""
        return APIError(
            429, message, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, round(self._mean_duration_s)))}
        )
