"""Times the steps of an engine in which only decoding happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kernels.api import Batch


@dataclass
class DecodeTimer:
    """Runs steps of an engine and adds up those that decode and do nothing else.

    Such a step computes no prompt, admits no request and gives tokens to every running request, of which there are at
    least `min_batch`. Times come from the steps themselves: the difference of two long runs, one with and one without
    decoding, may be anything where decoding is a small part of both.
    """

    engine: Engine
    min_batch: int = 1
    clock: Callable[[], float] = perf_counter
    seconds: float = 0.0
    forward_seconds: float = 0.0  # of `seconds`, those in which the model computes
    num_steps: int = 0
    num_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests per second of those steps; 0 where there was no such step."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def host_share(self) -> float:
        """The share of those steps outside of the model: scheduling, building batches, sampling. On a CPU only."""
        return 1 - self.forward_seconds / self.seconds if self.seconds else 0.0

    def step(self) -> None:
        """Run one step of the engine, and count it if it only decodes."""
        before = list(self.engine.scheduler.running)
        can_count = len(before) >= self.min_batch and not any(map(_computes_prompt, before))
        num_tokens = sum(len(r.tokens) for r in before)
        self.engine.runner = timed = TimedRunner(self.engine.runner, self.clock)
        started = self.clock()
        try:
            sampled = self.engine.step().token_ids
        finally:
            self.engine.runner = timed.runner
        elapsed = self.clock() - started
        if can_count and set(sampled) == set(before) and not any(map(_computes_prompt, self.engine.scheduler.running)):
            self.seconds += elapsed
            self.forward_seconds += timed.seconds
            self.num_steps += 1
            self.num_tokens += sum(len(r.tokens) for r in before) - num_tokens


class TimedRunner:
    """Runs another runner and adds up its time."""

    def __init__(self, runner: Runner, clock: Callable[[], float]):
        self.runner = runner
        self.clock = clock
        self.seconds = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """See Runner.forward."""
        started = self.clock()
        logits = self.runner.forward(batch)
        self.seconds += self.clock() - started
        return logits


def _computes_prompt(request: Request) -> bool:
    """Whether the next step computes more than the last token: a prompt, or tokens that a preemption dropped."""
    return request.finish_reason is None and request.num_uncomputed_tokens > 1
