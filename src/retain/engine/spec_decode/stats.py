"""Statistics of one request's drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecDecodeStats:
    """Counts of drafted and accepted tokens, by their position in a round, and times in seconds."""

    num_drafted_per_position: list[int] = field(default_factory=list)
    num_accepted_per_position: list[int] = field(default_factory=list)
    num_rounds: int = 0  # steps with drafts of the request
    num_fully_accepted: int = 0  # rounds in which every draft was accepted
    draft_s: float = 0.0  # of those rounds, for all requests in them
    verify_s: float = 0.0
    baseline_s: float = 0.0  # expected for as many steps without drafts; 0: unknown

    def record_round(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafted and the accepted tokens of one round of speculative decoding."""
        self.num_rounds += 1
        self.num_fully_accepted += num_drafted == num_accepted
        longer = [0] * (num_drafted - len(self.num_drafted_per_position))
        self.num_drafted_per_position += longer
        self.num_accepted_per_position += longer
        for i in range(num_drafted):
            self.num_drafted_per_position[i] += 1
            self.num_accepted_per_position[i] += i < num_accepted

    def summarize(self, tokens_per_s: float) -> dict[str, Any]:
        """Return totals, acceptance rates by position, and two speed-ups over plain decoding, as JSON.

        `expected_speedup` follows from tokens and seconds of the rounds, as in section 3 of the paper; `speedup` from
        the answer's `tokens_per_s`. Both are None where the time of plain steps is unknown.
        """
        counts = zip(self.num_accepted_per_position, self.num_drafted_per_position, strict=True)
        spent_s = self.draft_s + self.verify_s
        tokens_per_round = 0.0
        if self.num_rounds:
            tokens_per_round = 1 + sum(self.num_accepted_per_position) / self.num_rounds
        return {
            "rounds": self.num_rounds,
            "drafted": sum(self.num_drafted_per_position),
            "accepted": sum(self.num_accepted_per_position),
            "acceptance_rate_per_position": [round(accepted / drafted, 3) for accepted, drafted in counts],
            "mean_acceptance_length": round(tokens_per_round, 3),
            "draft_s": round(self.draft_s, 4),
            "verify_s": round(self.verify_s, 4),
            "expected_speedup": round(tokens_per_round * self.baseline_s / spent_s, 3) if self.baseline_s else None,
            "speedup": round(tokens_per_s * self.baseline_s / self.num_rounds, 3) if self.baseline_s else None,
        }
