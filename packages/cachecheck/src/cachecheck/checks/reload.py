"""Other weights behind the same address: nothing that the earlier weights computed is used."""

from __future__ import annotations

from cachecheck.comparison import compare
from cachecheck.probe import Probe

NUM_TEXTS = 4
NUM_WORDS = 140


def run(probe: Probe) -> None:
    """Texts that were cached under the earlier weights are new, and have the answers of the new weights."""
    probe.skip_unless(probe.config.reload_command, "no --reload-command")
    texts = [probe.texts.prompt(NUM_WORDS + 3 * i) for i in range(NUM_TEXTS)]
    before = [[probe.ask(text) for _ in range(2)][-1] for text in texts]
    probe.server.commands.reload()
    after = [probe.ask(text) for text in texts]
    if all(compare(b, a, probe.server.tolerance) is None for b, a in zip(before, after, strict=True)):
        probe.unsure("answers after the reload", "they are those of before: does the command load other weights?")
    for i, text in enumerate(texts):
        probe.not_cached(after[i], f"text {i} after the reload")
        probe.equal_cold(text, after[i], f"text {i}, its answer after the reload")
