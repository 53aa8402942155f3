"""What the bench's agents say of their pauses. Seconds are those of the sessions' clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

from retain.engine.hints import Hint, carry_out
from retain.engine.request import Request
from retain.kv.manager import KVCacheManager
from tools.agent_bench.recording import Turn

LEAD_STEPS = 10  # before an agent is back it has its text loaded


@dataclass(frozen=True)
class AgentHints:
    """`kind`: none, learned (which tool runs) or told (when it ends, wrong by up to `error` of the pause)."""

    kind: str
    error: float
    step_time: float

    def leave(self, cache: KVCacheManager, request: Request, following: Turn, rng: random.Random) -> None:
        """Say what a session waits for when its request has ended."""
        estimate = following.pause * (1 + self.error * rng.uniform(-1, 1))
        seconds = estimate if self.kind == "told" else None
        if self.kind != "none":
            carry_out(cache, Hint("signal", seconds, tool=following.speaker), request, request.text)

    @property
    def lead(self) -> float | None:
        """How many seconds before its return a text is to be loaded; None where it is not."""
        return LEAD_STEPS * self.step_time if self.kind == "told" else None

    def prefetch(self, cache: KVCacheManager, request: Request) -> None:
        """Have the text of a request that has ended loaded."""
        carry_out(cache, Hint("prefetch", self.lead), request, request.text)
