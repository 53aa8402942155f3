"""A reset of the cache: nothing of any level is found after it."""

from __future__ import annotations

from cachecheck.probe import Probe

NUM_TEXTS = 4
NUM_WORDS = 140


def run(probe: Probe) -> None:
    """Texts that were cached are new after the reset, and have the answers that they had."""
    probe.skip_unless(probe.config.reset_command, "no --reset-command")
    texts = [probe.texts.prompt(NUM_WORDS + 3 * i) for i in range(NUM_TEXTS)]
    before = [probe.ask(text) for text in texts]
    again = [probe.ask(text) for text in texts]
    if max(answer.num_cached for answer in again) <= probe.capabilities.allowance:
        probe.unsure("the reset", "nothing was counted as cached before it")
    probe.server.commands.reset()
    for i, text in enumerate(texts):
        after = probe.ask(text)
        probe.not_cached(after, f"text {i} after the reset")
        probe.equal(before[i], after, f"text {i}, its answer after the reset")
