"""What became of a request's drafts, counted. What is not known here: who drafted, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecDecodeStats:
    """What became of drafts: `accepted[i]` of the `drafted[i]` in place i."""

    num_drafted_per_position: list[int] = field(default_factory=list)
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_rounds: int = 0  # steps in which anything was drafted
    num_fully_accepted: int = 0  # of them, those in which every draft was right
    draft_s: float = 0.0  # of those rounds, whoever else was in them
    verify_s: float = 0.0
    baseline_s: float = 0.0  # that as many steps without drafts would have taken; 0: not known

    def summarize(self, tokens_per_s: float) -> dict[str, Any]:
        """For people: totals, the share that was accepted of drafts in each place, and times as fast as plain steps:
        these rounds by what they gave and cost, as section 3 of the paper reckons, and the answer by its `tok_s`.
        """
        by_place = [
            round(a / d, 3) for a, d in zip(self.num_accepted_per_position, self.num_drafted_per_position, strict=True)
        ]
        spent = self.draft_s + self.verify_s
        each = 1 + sum(self.num_accepted_per_position) / self.num_rounds if self.num_rounds else 0.0
        return {
            "rounds": self.num_rounds,
            "drafted": sum(self.num_drafted_per_position),
            "accepted": sum(self.num_accepted_per_position),
            "acceptance_rate_per_position": by_place,
            "mean_acceptance_length": round(each, 3),
            "draft_s": round(self.draft_s, 4),
            "verify_s": round(self.verify_s, 4),
            "expected_speedup": round(each * self.baseline_s / spent, 3) if self.baseline_s else None,
            "speedup": round(tokens_per_s * self.baseline_s / self.num_rounds, 3) if self.baseline_s else None,
        }

    def record_round(self, num_drafted: int, num_accepted: int) -> None:
        """One more round."""
        self.num_rounds += 1
        self.num_fully_accepted += num_drafted == num_accepted
        longer = [0] * (num_drafted - len(self.num_drafted_per_position))
        self.num_drafted_per_position += longer
        self.num_accepted_per_position += longer
        for i in range(num_drafted):
            self.num_drafted_per_position[i] += 1
            self.num_accepted_per_position[i] += i < num_accepted
