"""Who drafts for whom, and how much: an engine's drafters, each with a pace of its own.

What is not known here: whether drafts are right (speculate.py), what steps are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from retain.engine.drafters import Drafter, parse_draft_length
from retain.engine.request import Request, SampledTokens
from retain.engine.scheduler import ScheduledRequest
from retain.engine.spec_decode.draft_length import DraftLengthController

NO_SPECULATION = "off"  # what a request says that wants no drafts


class Speculator:
    """`own` drafts for who asks for nobody else, "" ; `others` by the names that requests ask for them."""

    def __init__(self, default: Drafter | None):
        self.default = default
        self.named: dict[str, Drafter] = {}
        self.length_controllers: dict[str, DraftLengthController] = {}

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """All of them, by name."""
        return {"": self.default, **self.named} if self.default else self.named

    def get_drafter(self, request: Request) -> Drafter | None:
        """Who drafts for it."""
        return self.drafters.get(request.input.drafter_name)

    def propose(self, running: Sequence[Request], max_drafts: int) -> float:
        """Guesses of what comes next, up to `most` tokens each, for who owes one token; how long they took, seconds."""
        took = 0.0
        for name, drafter in self.drafters.items() if running else ():
            asked = [
                (r, n) for r in running if r.input.drafter_name == name and (n := min(r.max_drafts, max_drafts)) > 0
            ]
            k = parse_draft_length(drafter)
            chosen = (
                [(r, min(n, k)) for r, n in asked]
                if k
                else self._get_length_controller(name, drafter).choose_lengths(asked)
            )
            began = perf_counter()
            drafter.propose([(r, n) for r, n in chosen if n])
            took += perf_counter() - began
        return took

    def update(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: Mapping[Request, SampledTokens],
        step_s: float,
        draft_s: float,
    ) -> None:
        """What drafts gave and took, in a step of `took` seconds; where a prompt was paid too, only what they gave."""
        names = {s.request.input.drafter_name for s in scheduled if s.request.drafts}
        for request, tokens in sampled.items():
            pace = self.length_controllers.get(request.input.drafter_name)
            if request.drafts:
                request.stats.spec_decode.draft_s += draft_s
                request.stats.spec_decode.verify_s += step_s
                request.stats.spec_decode.baseline_s += pace.step_time.predict(len(scheduled)) if pace else 0.0
            if pace:
                pace.record_acceptance(request, len(request.drafts), len(tokens) - 1)
        if len(names) <= 1 and all(s.num_tokens == 1 + len(s.request.drafts) for s in scheduled):
            levels = max(len(s.request.drafts) for s in scheduled)
            for name in names or self.length_controllers:
                if name in self.length_controllers:
                    self.length_controllers[name].record_step(
                        sum(s.num_tokens for s in scheduled), step_s, levels, draft_s
                    )

    def remove_request(self, request: Request) -> None:
        """It has ended."""
        if drafter := self.get_drafter(request):
            drafter.remove_request(request)

    def _get_length_controller(self, name: str, drafter: Drafter) -> DraftLengthController:
        return self.length_controllers.setdefault(name, DraftLengthController(drafter.max_draft_tokens))
