"""Times of prompts, apart from what every request takes. The least of a few counts: other load only adds."""

from __future__ import annotations

from retain.cachecheck.client import RefusedError
from retain.cachecheck.probe import Probe

NUM_TEXTS = 3
LENGTHS = (256, 512, 1024, 2048)  # words
LEAST_S = 0.02


def measure_fixed(probe: Probe) -> float:
    """Return the seconds of a request with a short prompt and one token."""
    return min(probe.ask(probe.texts.prompt(4), max_tokens=1).seconds for _ in range(NUM_TEXTS))


def find_timed_length(probe: Probe) -> int | None:
    """Return how many words take much longer to compute than a request takes anyway, or None."""
    fixed = measure_fixed(probe)
    for num_words in LENGTHS:
        try:
            seconds = [probe.ask(probe.texts.prompt(num_words), max_tokens=1).seconds for _ in range(NUM_TEXTS)]
        except RefusedError:  # longer than the model's context
            return None
        if min(seconds) - fixed > max(LEAST_S, 2 * fixed):
            return num_words
    return None
