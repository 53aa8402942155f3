"""The speculator: an engine's drafters, and the draft lengths of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import Drafter, parse_draft_length
from retain.engine.request import Request, SampledTokens
from retain.engine.scheduler import ScheduledRequest
from retain.engine.spec_decode.draft_length import DraftLengthController

NO_SPECULATION = "off"  # the name of a request's drafter that turns drafting off


class Speculator:
    """Let drafters propose tokens for requests.

    `default` drafts for requests that name no drafter; `named` has further drafters, by the names that requests give.
    """

    def __init__(self, default: Drafter | None):
        self.default = default
        self.named: dict[str, Drafter] = {}
        self.length_controllers: dict[str, DraftLengthController] = {}  # of drafters with automatic lengths

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """All drafters by name; the default's name is empty."""
        return {"": self.default, **self.named} if self.default else self.named

    @property
    def needs_hidden_states(self) -> bool:
        """Whether a drafter reads the hidden states of the target."""
        return any(drafter.needs.hidden_states for drafter in self.drafters.values())

    def get_drafter(self, request: Request) -> Drafter | None:
        """Return the drafter of a request, if it has one."""
        return self.drafters.get(request.input.drafter_name)

    def propose(self, running: Mapping[Request, RequestRow], max_drafts: int) -> float:
        """Set the drafts of running requests, at most `max_drafts` each. Returns the seconds that drafting took."""
        seconds = 0.0
        for name, drafter in self.drafters.items() if running else ():
            requests = [r for r in running if r.input.drafter_name == name]
            limits = [(r, n) for r in requests if (n := min(r.max_drafts, max_drafts)) > 0]
            if fixed := parse_draft_length(drafter):
                lengths = [(r, min(n, fixed)) for r, n in limits]
            else:
                lengths = self._length_controller(name, drafter).choose_lengths(limits, len(running))
            started = perf_counter()
            drafter.propose([(r, n) for r, n in lengths if n], running)
            seconds += perf_counter() - started
        return seconds

    def update(
        self,
        scheduled: Sequence[ScheduledRequest],
        sampled: Mapping[Request, SampledTokens],
        step_s: float,
        draft_s: float,
    ) -> None:
        """Record acceptance after a step; and its time, if the step computed nothing but decoding and verification.

        `step_s` is the time of the step without drafting, `draft_s` that of drafting.
        """
        names = {s.request.input.drafter_name for s in scheduled if s.request.drafts}
        for request, tokens in sampled.items():
            controller = self.length_controllers.get(request.input.drafter_name)
            if request.drafts:
                stats = request.stats.spec_decode
                stats.draft_s += draft_s
                stats.verify_s += step_s
                stats.baseline_s += controller.cost_table(len(scheduled)).step_s if controller else 0.0
            if controller:
                controller.record_acceptance(request, len(request.drafts), len(tokens) - 1)
        if len(names) <= 1 and all(s.num_tokens == 1 + len(s.request.drafts) for s in scheduled):
            num_tokens = sum(s.num_tokens for s in scheduled)
            depth = max(len(s.request.drafts) for s in scheduled)
            for name in names or self.length_controllers:  # a step of plain decoding is a measurement for all
                if name in self.length_controllers:
                    self.length_controllers[name].record_step(len(scheduled), num_tokens, step_s, depth, draft_s)

    def remove_request(self, request: Request) -> None:
        """Drop the drafter's state of a request that has ended."""
        if drafter := self.get_drafter(request):
            drafter.remove_request(request)

    def _length_controller(self, name: str, drafter: Drafter) -> DraftLengthController:
        return self.length_controllers.setdefault(name, DraftLengthController(drafter.max_draft_tokens))
