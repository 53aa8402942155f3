"""Log-probabilities of an answer and of its alternatives, from the cache and without it."""

from __future__ import annotations

from retain.cachecheck.answer import Answer
from retain.cachecheck.probe import LARGEST_NOISE, Probe

NUM_TEXTS = 4


def run(probe: Probe) -> None:
    """What a text asked again lists as likely tokens, is as likely as the first time."""
    probe.skip_unless(probe.texts.is_chat in probe.offers.logprobs, "the server offers no log-probabilities")
    probe.skip_unless(probe.server.noise.gap <= LARGEST_NOISE, "repeated requests differ too much")
    for i in range(NUM_TEXTS):
        text = probe.texts.prompt(40 + 30 * i)
        gap = largest_gap_of_alternatives(probe.ask(text), probe.ask(text))
        probe.judge(gap <= probe.server.tolerance, f"text {i}, again", f"log-probabilities differ by {gap:.4f}")


def largest_gap_of_alternatives(first: Answer, second: Answer) -> float:
    """Return the largest difference of tokens that both answers list at a place, up to where they part."""
    gap = 0.0
    for one, other in zip(first.tokens, second.tokens, strict=False):
        listed = one.top.keys() & other.top.keys()
        gap = max([gap, *(abs(one.top[text] - other.top[text]) for text in listed)])
        if one.text != other.text:
            break
    return gap
