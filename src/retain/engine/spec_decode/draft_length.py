"""Choose how many tokens to draft, by measured times and acceptance rates.

A step of n fresh tokens is modelled as a + b n seconds, fitted to the latest steps. Drafting one more token for all
requests takes d seconds. A draft of request r is accepted with probability alpha_r, at every position. So with K_r
drafts a round gives the sum of 1 + alpha_r + ... + alpha_r^K_r tokens in a + b (B + sum of K_r) + d max K_r seconds.
The controller chooses the lengths with the highest rate; length 0 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from retain.engine.request import Request

EMA_DECAY = 0.96  # weight of older measurements after each new one
EXPLORE_INTERVAL = 24  # least number of rounds between two explorations of another length
EXPLORE_BUDGET = 0.01  # share of the time that explorations may cost
MIN_GAIN = 1.03  # drafting must beat plain decoding by this factor: the measurements miss some of its costs
OUTLIER_FACTOR = 1.5  # times above this multiple of the prediction are cut to it: other work interfered


@dataclass
class LinearFit:
    """A straight line through points, in which older points count less.

    `w` is the sum of weights; the others are weighted sums of x, y, x * x and x * y.
    """

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add_point(self, x: float, y: float) -> None:
        """Add a point; all others count less by EMA_DECAY."""
        self.w = self.w * EMA_DECAY + 1.0
        self.x = self.x * EMA_DECAY + x
        self.y = self.y * EMA_DECAY + y
        self.xx = self.xx * EMA_DECAY + x * x
        self.xy = self.xy * EMA_DECAY + x * y

    def add_time(self, x: float, seconds: float) -> None:
        """Add a measured time to the fit; one that is far too long counts as less."""
        expected = self.predict(x)
        self.add_point(x, min(seconds, OUTLIER_FACTOR * expected) if expected else seconds)

    def predict(self, x: float) -> float:
        """Return the height of the line at x, with no negative slope; 0 without points."""
        if not self.w:
            return 0.0
        mean = self.x / self.w
        variance = self.xx / self.w - (self.x / self.w) ** 2
        slope = (self.xy / self.w - mean * self.y / self.w) / variance if variance > 0.01 else 0.0
        return max(self.y / self.w + max(slope, 0.0) * (x - mean), 1e-9)


@dataclass
class AcceptanceRate:
    """Estimate how often drafts are accepted; high before the first measurement, so that drafting is tried."""

    decayed_accepted: float = 1.5
    decayed_tried: float = 2.0

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round. Drafts after the first rejected one were not tried."""
        self.decayed_accepted = self.decayed_accepted * EMA_DECAY + num_accepted
        self.decayed_tried = self.decayed_tried * EMA_DECAY + min(num_accepted + 1, num_drafted)

    @property
    def alpha(self) -> float:
        """Probability that the next draft is accepted."""
        return min(self.decayed_accepted / self.decayed_tried, 0.99)


@dataclass
class DraftLengthController:
    """Choose the draft lengths of one drafter in one engine: at most `max_draft_tokens` for a request in a round."""

    max_draft_tokens: int
    step_time: LinearFit = field(default_factory=LinearFit)  # seconds by fresh tokens
    draft_time: LinearFit = field(default_factory=LinearFit)  # seconds of one more draft for all requests
    acceptance_rates: WeakKeyDictionary[Request, AcceptanceRate] = field(default_factory=WeakKeyDictionary)
    overall_acceptance_rate: AcceptanceRate = field(default_factory=AcceptanceRate)  # where new requests start
    num_rounds: int = 0
    num_drafting_rounds: int = 0  # rounds with drafts
    next_exploration: int = EXPLORE_INTERVAL  # the round that tries another length

    def choose_lengths(self, draft_limits: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Return for each request how many tokens to draft in this round, at most its limit."""
        if not draft_limits:
            return []
        self.num_rounds += 1
        if self.num_rounds <= 2 or (self.num_rounds <= 16 and self.num_drafting_rounds <= 3):  # too few measurements
            first = 0 if self.num_rounds <= 2 else 1 + (self.num_drafting_rounds > 1)
            return [(r, min(n, first)) for r, n in draft_limits]
        useful = [(r, min(n, self._max_useful_drafts(r))) for r, n in draft_limits]
        lengths = range(self.max_draft_tokens + 1)
        best = max(lengths, key=lambda k: self.estimate_throughput(k, useful) * (1 if k else MIN_GAIN))
        if self.num_rounds >= self.next_exploration:
            self.next_exploration = self.num_rounds + self._explore_interval(draft_limits)
            other = 0 if best else 1
            return [(r, min(n, other)) for r, n in draft_limits]
        return [(r, min(n, best)) for r, n in useful]

    def record_step(self, num_tokens: int, step_s: float, depth: int, draft_s: float) -> None:
        """Record a step of `num_tokens` fresh tokens, before which drafting `depth` tokens took `draft_s` seconds."""
        self.num_drafting_rounds += depth > 0
        if depth and self.num_drafting_rounds == 1:
            return  # the first round with drafts includes one-time costs
        self.step_time.add_time(num_tokens, step_s)
        if depth:
            self.draft_time.add_time(1.0, draft_s / depth)

    def record_acceptance(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted."""
        if num_drafted:
            self._acceptance_rate(request).update(num_drafted, num_accepted)
            self.overall_acceptance_rate.update(num_drafted, num_accepted)

    def estimate_throughput(self, depth: int, draft_limits: Sequence[tuple[Request, int]]) -> float:
        """Return the expected tokens a second if each request drafts `depth` tokens, or as many as its limit allows."""
        tokens = 0.0
        num_fresh = len(draft_limits)
        longest = 0
        for request, limit in draft_limits:
            alpha = self._acceptance_rate(request).alpha
            n = min(limit, depth)
            tokens += (1 - alpha ** (n + 1)) / (1 - alpha)
            num_fresh = num_fresh + n
            longest = max(longest, n)
        return tokens / max(self.step_time.predict(num_fresh) + self.draft_time.predict(1.0) * longest, 1e-9)

    def _max_useful_drafts(self, request: Request) -> int:
        """Return after how many drafts the next one would cost more than it gives."""
        step = max(self.step_time.predict(1.0), 1e-9)
        alpha = self._acceptance_rate(request).alpha
        n = 0
        cost = (self.step_time.predict(2.0) - step) / step  # of one more fresh token, in tokens of plain decoding
        while n < self.max_draft_tokens and alpha ** (n + 1) > cost:
            n += 1
        return n

    def _explore_interval(self, draft_limits: Sequence[tuple[Request, int]]) -> int:
        """Return the rounds until the next exploration: the more, the more tokens one is expected to lose."""
        plain = self.estimate_throughput(0, draft_limits)
        drafting = self.estimate_throughput(1, draft_limits)
        loss = max(plain / drafting - 1, 0.0)
        round_s = self.step_time.predict(2.0 * len(draft_limits)) + self.draft_time.predict(1.0)
        return max(EXPLORE_INTERVAL, int(loss * round_s * drafting / len(draft_limits) / EXPLORE_BUDGET))

    def _acceptance_rate(self, request: Request) -> AcceptanceRate:
        return self.acceptance_rates.setdefault(request, AcceptanceRate(2 * self.overall_acceptance_rate.alpha, 2.0))
