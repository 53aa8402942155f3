"""Usage: the cached tokens that it counts, against the prompt, the texts sent before, and the time that it takes."""

from __future__ import annotations

from retain.cachecheck.probe import Probe
from retain.cachecheck.timing import find_timed_length, measure_fixed

NUM_TEXTS = 3
NUM_TRIES = 3  # a fault of time must show in each
HIT = 0.5  # of the prompt: more is claimed to be cached
MISS = 0.1
SLOW = 0.8  # of the time of computing: nothing was cached
FAST = 0.3


def run(probe: Probe) -> None:
    """Counts are possible, texts that nobody has sent are not cached, and what counts as cached takes less time."""
    probe.skip_unless(probe.offers.counts_cached, "usage does not count cached tokens")
    for i in range(NUM_TEXTS):
        text = probe.texts.prompt(90 + 20 * i)
        first = probe.ask(text)
        again = probe.ask(text)
        probe.not_cached(first, f"text {i}, which nobody has sent")
        counts = f"{again.cached} cached of {again.prompt_tokens} prompt tokens, {first.prompt_tokens} the first time"
        is_possible = first.prompt_tokens == again.prompt_tokens and again.num_cached <= (again.prompt_tokens or 0)
        probe.judge(is_possible, f"text {i}, its counts", counts)
    num_words = find_timed_length(probe)
    if num_words is None:
        probe.unsure("times", "the server is too fast to tell by time what was cached")
        return
    problems = [compare_with_time(probe, num_words)]
    while problems[-1] and len(problems) < NUM_TRIES:
        problems.append(compare_with_time(probe, num_words))
    probe.judge(not problems[-1], "times", problems[-1])


def compare_with_time(probe: Probe, num_words: int) -> str:
    """Return how the count of a text asked again contradicts its time; nothing where it does not."""
    fixed = measure_fixed(probe)
    texts = [probe.texts.prompt(num_words) for _ in range(NUM_TEXTS)]
    computing = min(probe.ask(text, max_tokens=1).seconds for text in texts) - fixed
    again = [probe.ask(text, max_tokens=1) for text in texts]
    time = (min(answer.seconds for answer in again) - fixed) / max(computing, 1e-9)
    shares = [answer.num_cached / (answer.prompt_tokens or 1) for answer in again]
    if min(shares) >= HIT and time > SLOW:
        return f"usage claims {min(shares):.0%} of the prompt cached, but it takes {time:.0%} of the time of computing"
    if max(shares) <= MISS and time < FAST:
        return f"usage claims {max(shares):.0%} of the prompt cached, but it takes {time:.0%} of the time of computing"
    return ""
