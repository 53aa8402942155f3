"""What checks find: cases with an outcome, and the result of each check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """Of a case, and of a check: that of its worst case."""

    PASSED = "passed"
    SKIPPED = "skipped"  # the server does not offer what is checked
    UNSURE = "cannot tell"
    FAULT = "fault"


@dataclass(frozen=True)
class Case:
    """One comparison. `what` says which, and is the same in every run of a check."""

    what: str
    outcome: Outcome
    detail: str = ""
    needs_confirmation: bool = False  # other texts must show the same, because rounding may explain it


class SkipCheck(Exception):
    """The server does not offer what a check needs."""


@dataclass
class CheckResult:
    """The cases of one check, and how many requests it sent."""

    name: str
    cases: Sequence[Case] = ()
    num_requests: int = 0
    seconds: float = 0.0
    skipped: str = ""  # why
    error: str = ""  # that ended it

    @property
    def outcome(self) -> Outcome:
        """A fault where any case is one; else passed, unless nothing passed, a case is unsure or an error came."""
        counts = Counter(case.outcome for case in self.cases)
        counts[Outcome.UNSURE] += bool(self.error)
        for outcome in (Outcome.FAULT, Outcome.UNSURE, Outcome.PASSED):
            if counts[outcome]:
                return outcome
        return Outcome.SKIPPED

    @property
    def verdict(self) -> str:
        """The result of the check in a few words."""
        num_faults = sum(case.outcome == Outcome.FAULT for case in self.cases)
        if num_faults:
            return f"{num_faults} faults" if num_faults > 1 else "1 fault"
        if self.error:
            return f"cannot tell: {self.error}"
        if self.outcome == Outcome.UNSURE:
            num_passed = sum(case.outcome == Outcome.PASSED for case in self.cases)
            return f"cannot tell all: {num_passed} of {len(self.cases)} cases passed"
        return f"skipped: {self.skipped}" if self.skipped else str(self.outcome)

    @property
    def problems(self) -> list[Case]:
        """The cases that did not pass, faults first."""
        return sorted((c for c in self.cases if c.outcome != Outcome.PASSED), key=lambda c: c.outcome != Outcome.FAULT)


def confirm(runs: Sequence[Sequence[Case]]) -> list[Case]:
    """Merge runs of one check on other texts: what needs confirmation is a fault where every run shows it."""
    doubtful = [{c.what for c in run if c.needs_confirmation} for run in runs]
    always = set.intersection(*doubtful)
    merged = []
    for case in runs[0]:
        if not case.needs_confirmation or case.what in always:
            merged.append(case)
        else:
            reason = f"{case.detail}; other texts did not differ, so it may be rounding"
            merged.append(Case(case.what, Outcome.UNSURE, reason))
    return merged + [c for run in runs[1:] for c in run if c.outcome == Outcome.FAULT and not c.needs_confirmation]
