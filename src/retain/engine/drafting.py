"""Who drafts for whom, and how much: an engine's drafters, each with a pace of its own.

What is not known here: whether drafts are right (speculate.py), what steps are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from retain.engine.drafters import Drafter, limit
from retain.engine.pace import Pace
from retain.engine.request import Request
from retain.engine.sampler import Drawn
from retain.engine.scheduler import Share

OFF = "off"  # what a request says that wants no drafts


class Drafting:
    """`own` drafts for who asks for nobody else, "" ; `others` by the names that requests ask for them."""

    def __init__(self, own: Drafter | None):
        self.own = own
        self.others: dict[str, Drafter] = {}
        self.paces: dict[str, Pace] = {}

    @property
    def everyone(self) -> Mapping[str, Drafter]:
        """All of them, by name."""
        return {"": self.own, **self.others} if self.own else self.others

    def of(self, request: Request) -> Drafter | None:
        """Who drafts for it."""
        return self.everyone.get(request.speculate)

    def propose(self, running: Sequence[Request], most: int) -> float:
        """Guesses of what comes next, up to `most` tokens each, for who owes one token; how long they took, seconds."""
        took = 0.0
        for name, drafter in self.everyone.items() if running else ():
            asked = [(r, n) for r in running if r.speculate == name and (n := min(r.may_draft, most)) > 0]
            k = limit(drafter)
            chosen = [(r, min(n, k)) for r, n in asked] if k else self._pace(name, drafter).choose(asked)
            began = perf_counter()
            drafter.propose([(r, n) for r, n in chosen if n])
            took += perf_counter() - began
        return took

    def learn(self, shares: Sequence[Share], drawn: Mapping[Request, Drawn], took: float, drafting: float) -> None:
        """What drafts gave and took, in a step of `took` seconds; where a prompt was paid too, only what they gave."""
        names = {s.request.speculate for s in shares if s.request.drafts}
        for request, tokens in drawn.items():
            pace = self.paces.get(request.speculate)
            if request.drafts:
                request.rounds.draft_s += drafting
                request.rounds.verify_s += took
                request.rounds.plain_s += pace.steps.at(len(shares)) if pace else 0.0
            if pace:
                pace.saw(request, len(request.drafts), len(tokens) - 1)
        if len(names) <= 1 and all(s.n == 1 + len(s.request.drafts) for s in shares):
            levels = max(len(s.request.drafts) for s in shares)
            for name in names or self.paces:
                if name in self.paces:
                    self.paces[name].took(sum(s.n for s in shares), took, levels, drafting)

    def drop(self, request: Request) -> None:
        """It has ended."""
        if drafter := self.of(request):
            drafter.drop(request)

    def _pace(self, name: str, drafter: Drafter) -> Pace:
        return self.paces.setdefault(name, Pace(drafter.most))
