"""Texts with words of their own, asked at once: each has its own answer, and words of no other."""

from __future__ import annotations

from collections.abc import Sequence

from cachecheck.answer import Answer
from cachecheck.probe import Probe
from cachecheck.texts import Prompt

NUM_WORDS = 60
SHARED = 40  # words, of texts with one beginning
NUM_ROUNDS = 2


def run(probe: Probe) -> None:
    """Texts asked together answer as each does alone: those that are cached, and those that are not."""
    num_texts = probe.config.concurrency
    factor = probe.texts.factor
    beginning = probe.texts.words(SHARED * factor)
    groups = {
        "texts": [probe.texts.prompt(NUM_WORDS) for _ in range(num_texts)],
        "texts with one beginning": [
            probe.texts.of([*beginning, *probe.texts.quoting((NUM_WORDS - SHARED) * factor)]) for _ in range(num_texts)
        ],
    }
    for name, prompts in groups.items():
        together = probe.ask_together(prompts)
        check_group(probe, prompts, together, f"{name} at once")
        for i, (prompt, answer) in enumerate(zip(prompts, together, strict=True)):
            probe.equal_cold(prompt, answer, f"{name} at once, {i}")
        alone = [probe.ask(prompt) for prompt in prompts]
        for turn in range(NUM_ROUNDS):
            again = together if turn == 0 else probe.ask_together(prompts)
            for i in range(num_texts):
                probe.equal(alone[i], again[i], f"{name}, {i} alone and at once, round {turn}")
            check_group(probe, prompts, again, f"{name} at once, round {turn}")


def check_group(probe: Probe, prompts: Sequence[Prompt], answers: Sequence[Answer], name: str) -> None:
    """State that no answer has words of another prompt."""
    for i, answer in enumerate(answers):
        others = [prompt for j, prompt in enumerate(prompts) if j != i]
        probe.no_words_of(others, prompts[i], answer, f"{name}, words of {i}")
