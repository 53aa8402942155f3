"""Many texts in turns, so that some leave the cache, or move to a tier, and come back."""

from __future__ import annotations

from cachecheck.probe import Probe

NUM_TEXTS = 16
NUM_WORDS = 180
NUM_ROUNDS = 2  # after the first


def run(probe: Probe) -> None:
    """Each text has its first answer in every round."""
    prompts = [probe.texts.prompt(NUM_WORDS + 7 * i) for i in range(NUM_TEXTS)]
    first = [probe.ask(prompt) for prompt in prompts]
    for turn in range(NUM_ROUNDS):
        for i, prompt in enumerate(prompts):
            probe.equal(first[i], probe.ask(prompt), f"text {i}, round {turn + 2}")
