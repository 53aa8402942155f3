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
    plain_s: float = 0.0  # that as many steps without drafts would have taken; 0: not known

    def told(self, tok_s: float) -> dict[str, Any]:
        """For people: totals, the share that was accepted of drafts in each place, and times as fast as plain steps:
        these rounds by what they gave and cost, as section 3 of the paper reckons, and the answer by its `tok_s`.
        """
        by_place = [round(a / d, 3) for a, d in zip(self.accepted, self.drafted, strict=True)]
        spent = self.draft_s + self.verify_s
        each = 1 + sum(self.accepted) / self.rounds if self.rounds else 0.0
        return {
            "rounds": self.rounds,
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "accepted_by_place": by_place,
            "tokens_per_round": round(each, 3),
            "draft_s": round(self.draft_s, 4),
            "verify_s": round(self.verify_s, 4),
            "theory": round(each * self.plain_s / spent, 3) if self.plain_s else None,
            "times_plain": round(tok_s * self.plain_s / self.rounds, 3) if self.plain_s else None,
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
