"""Times of prompts, apart from what every request takes. The least of a few counts: other load only adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cachecheck.answer import Answer
from cachecheck.http_client import RefusedError
from cachecheck.probe import Probe
from cachecheck.results import Case, Outcome

NUM_TEXTS = 3
NUM_TRIES = 3  # a fault of time must show in each
LENGTHS = (256, 512, 1024, 2048)  # words
LEAST_S = 0.02


@dataclass(frozen=True)
class TimedLength:
    """A number of words that take much longer to compute than `fixed`, the seconds of a short prompt."""

    num_words: int
    fixed: float

    def seconds_of(self, answers: Iterable[Answer]) -> float:
        """Return the least time of the answers, less that of a short prompt."""
        return _least_seconds(answers) - self.fixed


def find_timed_length(probe: Probe) -> TimedLength | None:
    """Return how many words take much longer to compute than a request takes anyway, or None."""
    fixed = _least_seconds(probe.ask(probe.texts.prompt(4), max_tokens=1) for _ in range(NUM_TEXTS))
    for num_words in LENGTHS:
        texts = [probe.texts.prompt(num_words) for _ in range(NUM_TEXTS)]
        try:
            seconds = _least_seconds(probe.ask(text, max_tokens=1) for text in texts)
        except RefusedError:  # longer than the model's context
            return None
        if seconds - fixed > max(LEAST_S, 2 * fixed):
            return TimedLength(num_words, fixed)
    return None


def repeat_fault(measure: Callable[[], Case]) -> Case:
    """Measure again as long as a fault is found. Returns the last case: a fault if every one was."""
    case = measure()
    for _ in range(NUM_TRIES - 1):
        if case.outcome != Outcome.FAULT:
            break
        case = measure()
    return case


def _least_seconds(answers: Iterable[Answer]) -> float:
    return min(answer.seconds for answer in answers)
