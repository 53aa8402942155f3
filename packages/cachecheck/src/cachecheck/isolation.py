"""Whether a cache keeps tenants apart: by what usage counts, or by time where it counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cachecheck.answer import Answer
from cachecheck.probe import Probe
from cachecheck.results import Case, Outcome
from cachecheck.timing import TimedLength, find_timed_length, repeat_fault

NUM_TEXTS = 3
NUM_WORDS = 120
CACHED = 0.4  # of the time of computing: who answers sooner has a cache

Ask = Callable[..., Answer]  # of a prompt, with further fields of the request


def keep_apart(probe: Probe, ask: Ask, others: Mapping[str, Ask]) -> None:
    """State that a text which one tenant has asked is new to the others, and that all have the same answer."""
    for i in range(NUM_TEXTS):
        for name, ask_other in others.items():
            text = probe.texts.prompt(NUM_WORDS + 5 * i)
            first = ask(text)
            again = ask(text)
            found = ask_other(text)
            probe.equal(first, found, f"text {i}, the answer with {name}")
            if not probe.capabilities.counts_cached:
                continue
            if again.num_cached > probe.capabilities.allowance:
                probe.not_cached(found, f"text {i} with {name}")
            else:
                probe.unsure(f"text {i} with {name}", "even the same tenant finds nothing in the cache")
    if not probe.capabilities.counts_cached:
        compare_times(probe, ask, others)


def compare_times(probe: Probe, ask: Ask, others: Mapping[str, Ask]) -> None:
    """State that a text which one tenant has asked takes the others as long as a new one."""
    timed = find_timed_length(probe)
    if timed is None:
        probe.unsure("times", "usage does not count cached tokens, and the server is too fast to tell by time")
        return
    for name, ask_other in others.items():
        probe.cases.append(repeat_fault(partial(measure_other, probe, timed, ask, ask_other, f"times with {name}")))


def measure_other(probe: Probe, timed: TimedLength, ask: Ask, ask_other: Ask, what: str) -> Case:
    """Return a fault if another tenant waits as short for the texts of the first one as that one does."""
    texts = [probe.texts.prompt(timed.num_words) for _ in range(NUM_TEXTS)]
    computing, same, other = (
        timed.seconds_of(ask_one(text, max_tokens=1) for text in texts) for ask_one in (ask, ask, ask_other)
    )
    if same > CACHED * computing:
        return Case(what, Outcome.UNSURE, "even the same tenant is not faster the second time")
    if other > CACHED * computing:
        return Case(what, Outcome.PASSED)
    return Case(what, Outcome.FAULT, f"a text of the first tenant takes {other / computing:.0%} of computing it")
