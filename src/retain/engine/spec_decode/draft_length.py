"""Choose how many tokens to draft, by measured times and acceptance rates.

A round of B requests with n drafts of all takes step(1 + n / B) + d K seconds: `step` is a table of what steps with 1,
2, ... fresh tokens of each request took, d the time of one more draft for all requests, and K the longest number of
drafts. Draft i of request r is accepted with probability alpha_r^i. The controller takes drafts in the order of these
probabilities, as many as give the most tokens a second; none is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from retain.engine.request import Request

EMA_DECAY = 0.96  # weight of older measurements after each new one
LEVEL_WEIGHT = 0.1  # of a measurement in what all steps of a table take now
PRIOR_WEIGHT = 8.0  # drafts of a request that count as much as what is known of all requests
EXPLORE_INTERVAL = 24  # least number of rounds between two explorations of other lengths
EXPLORE_BUDGET = 0.01  # share of the time that explorations may cost
MIN_GAIN = 1.03  # drafting must beat plain decoding by this factor: the measurements miss some of its costs
OUTLIER_FACTOR = 1.5  # times above this multiple of the prediction are cut to it: other work interfered


@dataclass
class CostTable:
    """What steps take with 1, 2, ... fresh tokens of each request, in batches of about one size.

    `factors` relate them to a step of one token each: they are no line, where kernels take rows in blocks, or where the
    first rows wake most experts. They change little; `step_s` follows what changes all steps, such as longer contexts.
    """

    step_s: float = 0.0  # of one fresh token for each request
    draft_s: float = 0.0  # of one more draft for all requests
    factors: dict[float, float] = field(default_factory=lambda: {1.0: 1.0})
    num_measured: dict[float, int] = field(default_factory=dict)
    num_rounds: int = 0
    next_exploration: int = EXPLORE_INTERVAL  # the round that tries other lengths

    def copy(self) -> CostTable:
        """Return a table that starts from what this one knows, and trusts new measurements more."""
        return replace(self, factors=dict(self.factors), num_measured={})

    def add_step(self, rows: float, seconds: float) -> None:
        """Add a measured step with so many fresh tokens of each request; one that is far too long counts as less."""
        n = round(4 * rows) / 4
        seconds = max(seconds, 1e-9)
        self.step_s = self.step_s or seconds
        measured = self.num_measured.get(n, 0)
        self.num_measured[n] = measured + 1
        ratio = seconds / self.predict(rows)
        if measured:
            ratio = min(ratio, OUTLIER_FACTOR)
        weight = max(1 / (measured + 1), 1 - EMA_DECAY)
        if n == 1:
            self.step_s *= ratio ** max(weight, LEVEL_WEIGHT)
        else:
            self.factors[n] = self.predict(n) / self.step_s * ratio**weight
            self.step_s *= ratio ** (LEVEL_WEIGHT * (1 - weight))

    def add_draft(self, seconds: float) -> None:
        """Add the measured time of one draft for all requests."""
        seconds = min(seconds, OUTLIER_FACTOR * self.draft_s) if self.draft_s else seconds
        self.draft_s += (seconds - self.draft_s) * (LEVEL_WEIGHT if self.draft_s else 1)

    def predict(self, rows: float) -> float:
        """Return the seconds of a step with so many fresh tokens of each request; 0 before the first measurement."""
        return float(self.predict_all(np.array([rows]))[0])

    def predict_all(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of steps with these numbers of fresh tokens.

        Between measured numbers they are on a line. Above all of them more tokens cost nothing, so that they are tried.
        """
        known = sorted(self.factors)
        return self.step_s * np.interp(rows, known, [self.factors[n] for n in known])


@dataclass
class AcceptanceRate:
    """Estimate how often drafts are accepted; older ones count less."""

    decayed_accepted: float = 0.0
    decayed_tried: float = 0.0

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Count a round. Drafts after the first rejected one were not tried."""
        self.decayed_accepted = self.decayed_accepted * EMA_DECAY + num_accepted
        self.decayed_tried = self.decayed_tried * EMA_DECAY + min(num_accepted + 1, num_drafted)

    def estimate(self, prior: float = 0.0, prior_weight: float = 0.0) -> float:
        """Return the probability that the next draft is accepted; a prior counts like so many drafts."""
        return min((self.decayed_accepted + prior_weight * prior) / (self.decayed_tried + prior_weight), 0.99)


@dataclass
class DraftLengthController:
    """Choose the draft lengths of one drafter in one engine: at most `max_draft_tokens` for a request in a round.

    What it has learned stays for later requests.
    """

    max_draft_tokens: int
    tables: dict[int, CostTable] = field(default_factory=dict)  # by the bits of a batch's size
    acceptance_rates: WeakKeyDictionary[Request, AcceptanceRate] = field(default_factory=WeakKeyDictionary)
    overall_acceptance_rate: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(1.5, 2.0))
    longest_tried: int = 0  # most drafts of one request so far
    num_rounds: int = 0

    def choose_lengths(self, draft_limits: Sequence[tuple[Request, int]], batch_size: int) -> list[tuple[Request, int]]:
        """Return for each request of a batch that may draft how many tokens to draft now, at most its limit."""
        if not draft_limits:
            return []
        self.num_rounds += 1
        table = self.cost_table(batch_size)
        table.num_rounds += 1
        lengths = [0] * len(draft_limits)
        if self.num_rounds > 2:  # two rounds measure plain decoding first
            longest = min(2 * self.longest_tried + 1, self.max_draft_tokens)  # costs of more are not known yet
            lengths = self._find_best([(r, min(n, longest)) for r, n in draft_limits], batch_size)
        if table.num_rounds >= table.next_exploration:
            lengths = self._explore(lengths, draft_limits, batch_size)
        return [(request, n) for (request, _), n in zip(draft_limits, lengths, strict=True)]

    def record_step(self, batch_size: int, num_tokens: int, step_s: float, depth: int, draft_s: float) -> None:
        """Record a step of `num_tokens` fresh tokens, before which drafting `depth` tokens took `draft_s` seconds."""
        had_drafts = self.longest_tried > 0
        self.longest_tried = max(self.longest_tried, depth)
        if depth and not had_drafts:
            return  # the first round with drafts includes one-time costs
        table = self.cost_table(batch_size)
        table.add_step(num_tokens / batch_size, step_s)
        if depth:
            table.add_draft(draft_s / depth)

    def record_acceptance(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Record how many of a request's drafts were accepted."""
        if num_drafted:
            self.acceptance_rates.setdefault(request, AcceptanceRate()).update(num_drafted, num_accepted)
            self.overall_acceptance_rate.update(num_drafted, num_accepted)

    def cost_table(self, batch_size: int) -> CostTable:
        """Return the table for batches of about this size; a new one starts from the nearest that there is."""
        key = (batch_size - 1).bit_length()
        if key not in self.tables:
            nearest = min(self.tables, key=lambda other: abs(other - key), default=None)
            self.tables[key] = CostTable() if nearest is None else self.tables[nearest].copy()
        return self.tables[key]

    def _find_best(self, draft_limits: Sequence[tuple[Request, int]], batch_size: int) -> list[int]:
        """Return the lengths that give the most tokens a second."""
        table = self.cost_table(batch_size)
        limits = np.array([limit for _, limit in draft_limits])
        alphas = np.array([self._alpha(request) for request, _ in draft_limits])
        numbers = np.arange(1, limits.max() + 1)
        chances = np.where(numbers <= limits[:, None], alphas[:, None] ** numbers, 0.0)  # [requests, drafts]
        best = np.zeros_like(limits)
        step_s = table.predict_all(1 + np.arange(chances.size + 1) / batch_size) + 1e-9  # by all drafts of a step
        best_rate = MIN_GAIN * batch_size / step_s[0]
        for depth in numbers:
            own = chances[:, :depth]
            order = np.argsort(-own, axis=None, kind="stable")
            likeliest = own.flat[order]
            rates = (batch_size + likeliest.cumsum()) / (step_s[1 : likeliest.size + 1] + depth * table.draft_s)
            chosen = rates.argmax()
            if rates[chosen] > best_rate:
                best_rate = rates[chosen]
                best = np.bincount(order[: chosen + 1] // depth, minlength=len(limits))
        return [int(n) for n in best]

    def _explore(self, best: list[int], draft_limits: Sequence[tuple[Request, int]], batch_size: int) -> list[int]:
        """Return other lengths, whose costs may have changed. The more time they may lose, the later the next ones."""
        table = self.cost_table(batch_size)
        shorter = table.num_rounds // EXPLORE_INTERVAL % 2 == 1 and any(best)
        lengths = [min(0 if shorter else n + 1, limit) for n, (_, limit) in zip(best, draft_limits, strict=True)]
        alphas = [self._alpha(request) for request, _ in draft_limits]
        tokens, seconds = self._estimate(alphas, best, batch_size)
        other_tokens, other_seconds = self._estimate(alphas, lengths, batch_size)
        lost_rounds = other_seconds / seconds - other_tokens / tokens
        table.next_exploration = table.num_rounds + max(EXPLORE_INTERVAL, int(lost_rounds / EXPLORE_BUDGET))
        return lengths

    def _estimate(self, alphas: Sequence[float], lengths: Sequence[int], batch_size: int) -> tuple[float, float]:
        """Return the expected tokens of a round with so many drafts, and its seconds."""
        drafts = sum(alpha**i for alpha, n in zip(alphas, lengths, strict=True) for i in range(1, n + 1))
        table = self.cost_table(batch_size)
        seconds = table.predict(1 + sum(lengths) / batch_size) + table.draft_s * max(lengths)
        return batch_size + drafts, max(seconds, 1e-9)

    def _alpha(self, request: Request) -> float:
        """Return the probability that a draft of a request is accepted, which begins as that of all requests."""
        prior = self.overall_acceptance_rate.estimate()
        return self.acceptance_rates.get(request, AcceptanceRate()).estimate(prior, PRIOR_WEIGHT)
