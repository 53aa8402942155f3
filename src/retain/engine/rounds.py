"""What became of a request's drafts, counted. What is not known here: who drafted, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Rounds:
    """What became of drafts: `accepted[i]` of the `drafted[i]` in place i."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0  # steps in which anything was drafted
    full: int = 0  # of them, those in which every draft was right
    draft_s: float = 0.0  # of those rounds, whoever else was in them
    verify_s: float = 0.0

    def told(self) -> dict[str, Any]:
        """For people: totals, and the share that was accepted of the drafts in each place."""
        by_place = [round(a / d, 3) for a, d in zip(self.accepted, self.drafted, strict=True)]
        return {
            "rounds": self.rounds,
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "accepted_by_place": by_place,
            "tokens_per_round": round(1 + sum(self.accepted) / self.rounds, 3) if self.rounds else 0.0,
            "draft_s": round(self.draft_s, 4),
            "verify_s": round(self.verify_s, 4),
        }

    def add(self, drafted: int, accepted: int) -> None:
        """One more round."""
        self.rounds += 1
        self.full += drafted == accepted
        longer = [0] * (drafted - len(self.drafted))
        self.drafted += longer
        self.accepted += longer
        for i in range(drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < accepted
