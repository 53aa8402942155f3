"""Whether a cache keeps tenants apart: by what usage counts, or by time where it counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from retain.cachecheck.answer import Answer
from retain.cachecheck.probe import Probe
from retain.cachecheck.texts import Prompt
from retain.cachecheck.timing import find_timed_length, measure_fixed

NUM_TEXTS = 3
NUM_WORDS = 120
CACHED = 0.4  # of the time of computing: who answers sooner has a cache

Ask = Callable[[Prompt], Answer]


def keep_apart(probe: Probe, ask: Ask, others: Mapping[str, Ask]) -> None:
    """State that a text which one tenant has asked is new to the others, and that all have the same answer."""
    for i in range(NUM_TEXTS):
        for name, ask_other in others.items():
            text = probe.texts.prompt(NUM_WORDS + 5 * i)
            first = ask(text)
            again = ask(text)
            found = ask_other(text)
            probe.equal(first, found, f"text {i}, the answer with {name}")
            if not probe.offers.counts_cached:
                continue
            if again.num_cached > probe.offers.allowance:
                probe.not_cached(found, f"text {i} with {name}")
            else:
                probe.unsure(f"text {i} with {name}", "even the same tenant finds nothing in the cache")
    if not probe.offers.counts_cached:
        compare_times(probe, ask, others)


def compare_times(probe: Probe, ask: Ask, others: Mapping[str, Ask]) -> None:
    """State that a text which one tenant has asked takes the others as long as a new one."""
    num_words = find_timed_length(probe)
    if num_words is None:
        probe.unsure("times", "usage does not count cached tokens, and the server is too fast to tell by time")
        return
    fixed = measure_fixed(probe)
    for name, ask_other in others.items():
        texts = [probe.texts.prompt(num_words) for _ in range(NUM_TEXTS)]
        computing = min(ask(text).seconds for text in texts) - fixed
        same = min(ask(text).seconds for text in texts) - fixed
        other = min(ask_other(text).seconds for text in texts) - fixed
        if same > CACHED * computing:
            probe.unsure(f"times with {name}", "even the same tenant is not faster the second time")
        else:
            detail = f"a text of the first tenant takes {other / computing:.0%} of the time of computing it"
            probe.judge(other > CACHED * computing, f"times with {name}", detail)
