"""A restart of the server: what it keeps gives the answers of before."""

from __future__ import annotations

from cachecheck.probe import Probe

NUM_TEXTS = 6
NUM_WORDS = 140


def run(probe: Probe) -> None:
    """Texts, also continued ones, have the same answers after a restart."""
    probe.skip_unless(probe.config.restart_command, "no --restart-command")
    texts = [probe.texts.prompt(NUM_WORDS + 3 * i) for i in range(NUM_TEXTS)]
    before = [probe.ask(text) for text in texts]
    continued = [text.extended(probe.texts.words(5)) for text in texts]
    continued_before = [probe.ask(text) for text in continued]
    probe.server.commands.restart()
    for i, text in enumerate(texts):
        probe.equal(before[i], probe.ask(text), f"text {i} after the restart")
        probe.equal(continued_before[i], probe.ask(continued[i]), f"text {i}, continued, after the restart")
