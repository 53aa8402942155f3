"""How much is let in: the queue's bound, what one key may have at once, sizes, times. Not known here: answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from retain.server.errors import Refused


@dataclass(frozen=True)
class Limits:
    """None: none. An answer counts once, whoever asked for it; `n=4` are four."""

    queue: int = 256  # answers that wait, besides those that run
    per_key: int | None = None  # answers of one key at once
    tokens: int | None = None  # of an answer, at most
    choices: int = 16  # of one request: prompts times n
    body: int = 8 * 2**20  # bytes
    upload_s: float = 30.0  # for the body to come
    answer_s: float = 600.0  # from its arrival to its end
    pin_s: float = 3600.0


class Gate:
    """Lets answers in, up to `rows` that run and the queue's bound."""

    def __init__(self, limits: Limits, rows: int):
        self.limits, self.most = limits, rows + limits.queue
        self.inside = 0
        self.closed = False  # draining: nobody new
        self._of: Counter[str] = Counter()
        self._mean = 1.0  # seconds that an answer took

    @contextmanager
    def enter(self, key: str, n: int) -> Iterator[None]:
        """So many answers for a key. Raises Refused."""
        if self.closed:
            raise Refused(503, "the server is going away", headers={"Retry-After": "5"})
        if n > self.limits.choices:
            raise Refused(400, f"{n} answers at once: at most {self.limits.choices}", "n")
        most = self.limits.per_key
        if most is not None and self._of[key] + n > most:
            raise self._later(f"this key has {self._of[key]} answers in the making, of {most} that it may have")
        if self.inside + n > self.most:
            raise self._later(f"the queue is full: {self.inside} answers are in the making")
        self.inside += n
        self._of[key] += n
        began = monotonic()
        try:
            yield
        finally:
            self.inside -= n
            self._of[key] -= n
            if not self._of[key]:
                del self._of[key]
            self._mean += 0.1 * (monotonic() - began - self._mean)

    def _later(self, why: str) -> Refused:
        """When about one of those inside will have ended."""
        return Refused(429, why, code="rate_limit_exceeded", headers={"Retry-After": str(max(1, round(self._mean)))})
