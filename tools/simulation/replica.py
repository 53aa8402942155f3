"""A simulated replica: the engine's scheduler over a simulated cache, on a clock of calibrated steps."""

from __future__ import annotations

from retain.engine.prompt_sharing import PromptSharing
from retain.engine.request import FinishReason, Request
from retain.engine.scheduler import ScheduledRequest, Scheduler
from tools.simulation.cache import SimulatedCache
from tools.simulation.calibration import Calibration, measure_work

ANSWER_TOKENS, MAX_ANSWERS = 2**15, 2**16  # ids of the answer of one request, and requests before they come again


class SimulatedReplica:
    """One replica. `start_step` and `finish_step` alternate; what happens in a step is what `Engine.step` does."""

    def __init__(self, calibration: Calibration, cache: SimulatedCache):
        self.calibration, self.cache = calibration, cache
        self.scheduler = Scheduler(cache, PromptSharing())
        self.scheduled: list[ScheduledRequest] = []  # of the step that runs
        self.busy_seconds = 0.0
        self.num_computed_tokens = 0

    @property
    def is_idle(self) -> bool:
        """Whether no step runs."""
        return not self.scheduled

    def add(self, request: Request) -> None:
        """Enqueue a request. Raises ValueError when it could never fit."""
        self.scheduler.check_fits(request)
        self.scheduler.enqueue(request)

    def start_step(self) -> float | None:
        """Schedule the next step. Returns its seconds, or None where there is nothing to compute.

        Pages are loaded while the step computes, so that it takes as long as the slower of the two.
        """
        self.scheduled = scheduled = self.scheduler.schedule()
        if not scheduled:
            return None
        chunks = [(s.request.num_computed_tokens, s.num_tokens) for s in scheduled]
        compute_s = self.calibration.step_seconds(measure_work(chunks))
        load_s = self.cache.read_loads(s.row.index for s in scheduled)
        num_tokens = sum(s.num_tokens for s in scheduled)
        if not load_s and num_tokens >= self.cache.page_size:
            self.cache.cost_model.record_compute(num_tokens, compute_s)
        seconds = max(compute_s, load_s)
        self.busy_seconds += seconds
        self.num_computed_tokens += num_tokens
        return seconds

    def finish_step(self, now: float) -> list[Request]:
        """Count the step's tokens, answer with the next ones, and return the requests that have ended."""
        scheduled, self.scheduled = self.scheduled, []
        answering = [s.request for s in scheduled if s.request.will_sample(s.num_tokens)]
        for s in scheduled:
            s.request.advance(s.num_tokens)
            s.row.advance(s.request.num_computed_tokens, s.request.num_uncomputed_tokens)
        for request in answering:
            self._answer(request, now)
        return [request for request in answering if request.finish_reason]

    def next_token(self, request: Request) -> int:
        """Return the next token of an answer: one that no other text has."""
        return -1 - request.id % MAX_ANSWERS * ANSWER_TOKENS - request.num_output_tokens % ANSWER_TOKENS

    def _answer(self, request: Request, now: float) -> None:
        """Append a token to the answer, and end the request with its last one."""
        stats = request.stats
        stats.first_token_time = stats.first_token_time or now
        request.append_token(self.next_token(request), None)
        if reason := request.check_stop():
            self._finish(request, reason, now)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        request.finish_reason, request.stats.finish_time = reason, now
        self.scheduler.remove(request)
