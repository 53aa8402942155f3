"""How many drafts are worth their time, by what steps and drafts took and how often they were right.

A step of n fresh tokens is modelled as a + b n seconds, fitted to the latest steps; a draft of all requests by one more
token costs d. A draft of request r is right with probability alpha_r, whatever its place. So with K_r drafts a round
gives sum of 1 + alpha_r + ... + alpha_r^K_r tokens in a + b (B + sum of K_r) + d max K_r seconds, and the best is
chosen; 0 is plain decoding. What is not known here: who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from retain.engine.request import Request

EMA_DECAY = 0.96  # of a measurement after one more
EXPLORE_INTERVAL = 24  # rounds at least from one that tries something else to the next
EXPLORE_BUDGET = 0.01  # of the time, at most, goes into tries
MIN_GAIN = 1.03  # times plain's rate, from which drafts are believed to pay: less is lost in what measuring misses
OUTLIER_FACTOR = 1.5  # times what was expected: a step that took longer was held up by somebody else


@dataclass
class LinearFit:
    """The straight line through the latest points, in which older ones count less."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add_point(self, x: float, y: float) -> None:
        """One more point."""
        for name, value in (("w", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, getattr(self, name) * EMA_DECAY + value)

    def predict(self, x: float) -> float:
        """Its height there; never falling. 0 where nothing is known."""
        if not self.w:
            return 0.0
        mean, spread = self.x / self.w, self.xx / self.w - (self.x / self.w) ** 2
        slope = (self.xy / self.w - mean * self.y / self.w) / spread if spread > 0.01 else 0.0
        return max(self.y / self.w + max(slope, 0.0) * (x - mean), 1e-9)


@dataclass
class AcceptanceRate:
    """How often drafts are right; hopeful at first."""

    decayed_accepted: float = 1.5
    decayed_tried: float = 2.0

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """One more round. What comes behind the first wrong one was never tried."""
        self.decayed_accepted = self.decayed_accepted * EMA_DECAY + num_accepted
        self.decayed_tried = self.decayed_tried * EMA_DECAY + min(num_accepted + 1, num_drafted)

    @property
    def alpha(self) -> float:
        """Of the next one."""
        return min(self.decayed_accepted / self.decayed_tried, 0.99)


@dataclass
class DraftLengthController:
    """Of one engine. `most`: drafts of a request in a round."""

    max_draft_tokens: int
    step_time: LinearFit = field(default_factory=LinearFit)  # seconds of fresh tokens
    draft_time: LinearFit = field(default_factory=LinearFit)  # seconds of levels: 0 drafts are 0
    acceptance_rates: WeakKeyDictionary[Request, AcceptanceRate] = field(default_factory=WeakKeyDictionary)
    overall_acceptance_rate: AcceptanceRate = field(
        default_factory=AcceptanceRate
    )  # what a new request is expected to have
    num_rounds: int = 0
    num_drafting_rounds: int = 0  # rounds in which anything was drafted
    next_exploration: int = EXPLORE_INTERVAL

    def choose_lengths(self, draft_limits: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """How many each shall draft, at most as many as there is room for."""
        if not draft_limits:
            return []
        self.num_rounds += 1
        if self.num_rounds <= 2 or (self.num_rounds <= 16 and self.num_drafting_rounds <= 3):  # too little is known
            first = 0 if self.num_rounds <= 2 else 1 + (self.num_drafting_rounds > 1)
            return [(r, min(n, first)) for r, n in draft_limits]
        room = [(r, min(n, self._compute_max_drafts(r))) for r, n in draft_limits]
        best = max(
            range(self.max_draft_tokens + 1), key=lambda k: self.estimate_throughput(k, room) * (1 if k else MIN_GAIN)
        )
        if self.num_rounds >= self.next_exploration:
            self.next_exploration = self.num_rounds + self._compute_explore_interval(draft_limits)
            other = 0 if best else 1
            return [(r, min(n, other)) for r, n in draft_limits]
        return [(r, min(n, best)) for r, n in room]

    def record_step(self, num_tokens: int, step_s: float, depth: int, draft_s: float) -> None:
        """A step of so many fresh tokens, before which so many levels were drafted in `drafting` seconds."""
        self.num_drafting_rounds += depth > 0
        if depth and self.num_drafting_rounds == 1:
            return  # everything is done for the first time
        expected = self.step_time.predict(num_tokens)
        self.step_time.add_point(num_tokens, min(step_s, OUTLIER_FACTOR * expected) if expected else step_s)
        if depth:
            self.draft_time.add_point(1.0, draft_s / depth)

    def record_acceptance(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """What became of its drafts."""
        if num_drafted:
            self._get_acceptance_rate(request).update(num_drafted, num_accepted)
            self.overall_acceptance_rate.update(num_drafted, num_accepted)

    def estimate_throughput(self, depth: int, draft_limits: Sequence[tuple[Request, int]]) -> float:
        """Tokens a second that are expected, if each drafts so many, as far as it has room."""
        tokens, fresh, most = 0.0, len(draft_limits), 0
        for request, room in draft_limits:
            alpha, n = self._get_acceptance_rate(request).alpha, min(room, depth)
            tokens += (1 - alpha ** (n + 1)) / (1 - alpha)
            fresh, most = fresh + n, max(most, n)
        return tokens / max(self.step_time.predict(fresh) + self.draft_time.predict(1.0) * most, 1e-9)

    def _compute_max_drafts(self, request: Request) -> int:
        """Drafts of one request, until the next is likely wrong and only makes the step longer."""
        step, alpha, n = max(self.step_time.predict(1.0), 1e-9), self._get_acceptance_rate(request).alpha, 0
        price = (self.step_time.predict(2.0) - step) / step  # of a fresh token, in tokens that a step gives
        while n < self.max_draft_tokens and alpha ** (n + 1) > price:
            n += 1
        return n

    def _compute_explore_interval(self, draft_limits: Sequence[tuple[Request, int]]) -> int:
        """Rounds until something else is tried again: the more a try is expected to cost, the more."""
        plain, tried = self.estimate_throughput(0, draft_limits), self.estimate_throughput(1, draft_limits)
        lost = (
            max(plain / tried - 1, 0.0)
            * (self.step_time.predict(2.0 * len(draft_limits)) + self.draft_time.predict(1.0))
            * tried
            / len(draft_limits)
        )
        return max(EXPLORE_INTERVAL, int(lost / EXPLORE_BUDGET))

    def _get_acceptance_rate(self, request: Request) -> AcceptanceRate:
        return self.acceptance_rates.setdefault(request, AcceptanceRate(2 * self.overall_acceptance_rate.alpha, 2.0))
