"""Log-probabilities of an answer and of its alternatives, from the cache and without it."""

from __future__ import annotations

from cachecheck.comparison import largest_gap
from cachecheck.probe import Probe
from cachecheck.server import LARGEST_NOISE

NUM_TEXTS = 4


def run(probe: Probe) -> None:
    """What a text asked again lists as likely tokens, is as likely as the first time."""
    probe.skip_unless(
        probe.texts.endpoint in probe.capabilities.with_logprobs, "the server offers no log-probabilities"
    )
    probe.skip_unless(probe.server.noise.gap <= LARGEST_NOISE, "repeated requests differ too much")
    for i in range(NUM_TEXTS):
        text = probe.texts.prompt(40 + 30 * i)
        gap = largest_gap(probe.ask(text), probe.ask(text))
        probe.judge(gap <= probe.server.tolerance, f"text {i}, again", f"log-probabilities differ by {gap:.4f}")
