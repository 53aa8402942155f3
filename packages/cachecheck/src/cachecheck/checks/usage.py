"""Usage: the cached tokens that it counts, against the prompt, the texts sent before, and the time that it takes."""

from __future__ import annotations

from functools import partial

from cachecheck.probe import Probe
from cachecheck.results import Case, Outcome
from cachecheck.timing import TimedLength, find_timed_length, repeat_fault

NUM_TEXTS = 3
HIT = 0.5  # of the prompt: more is claimed to be cached
MISS = 0.1
SLOW = 0.8  # of the time of computing: nothing was cached
FAST = 0.3


def run(probe: Probe) -> None:
    """Counts are possible, texts that nobody has sent are not cached, and what counts as cached takes less time."""
    probe.skip_unless(probe.capabilities.counts_cached, "usage does not count cached tokens")
    for i in range(NUM_TEXTS):
        text = probe.texts.prompt(90 + 20 * i)
        first = probe.ask(text)
        again = probe.ask(text)
        probe.not_cached(first, f"text {i}, which nobody has sent")
        counts = f"{again.cached} cached of {again.prompt_tokens} prompt tokens, {first.prompt_tokens} the first time"
        is_possible = first.prompt_tokens == again.prompt_tokens and again.num_cached <= (again.prompt_tokens or 0)
        probe.judge(is_possible, f"text {i}, its counts", counts)
    timed = find_timed_length(probe)
    if timed is None:
        probe.unsure("times", "the server is too fast to tell by time what was cached")
        return
    probe.cases.append(repeat_fault(partial(compare_with_time, probe, timed)))


def compare_with_time(probe: Probe, timed: TimedLength) -> Case:
    """Return a fault if the count of a text asked again contradicts its time."""
    texts = [probe.texts.prompt(timed.num_words) for _ in range(NUM_TEXTS)]
    computing = timed.seconds_of(probe.ask(text, max_tokens=1) for text in texts)
    again = [probe.ask(text, max_tokens=1) for text in texts]
    time = timed.seconds_of(again) / max(computing, 1e-9)
    shares = [answer.num_cached / (answer.prompt_tokens or 1) for answer in again]
    if min(shares) >= HIT and time > SLOW:
        claimed = min(shares)
    elif max(shares) <= MISS and time < FAST:
        claimed = max(shares)
    else:
        return Case("times", Outcome.PASSED)
    detail = f"usage claims {claimed:.0%} of the prompt cached, but it takes {time:.0%} of the time of computing"
    return Case("times", Outcome.FAULT, detail)
