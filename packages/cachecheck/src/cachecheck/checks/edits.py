"""Texts that are edited in their middle: replaced, inserted and deleted words."""

from __future__ import annotations

from cachecheck.probe import Probe
from cachecheck.texts import QUOTE

NUM_WORDS = 110
PLACES = (13, 24, 38, 55, 71, 90)
NUM_EDITED = 3


def run(probe: Probe) -> None:
    """An edited text has the answer that it has without a cache, and the text before keeps its own."""
    for place in PLACES:
        place *= probe.texts.factor
        words = probe.texts.words(NUM_WORDS * probe.texts.factor)
        words[-QUOTE:] = words[place - QUOTE : place]  # a model that copies goes on with the edited words
        original = probe.texts.of(words)
        first = probe.ask(original)
        new = probe.texts.words(NUM_EDITED)
        variants = {
            "replaced": [*words[:place], *new, *words[place + NUM_EDITED :]],
            "inserted": [*words[:place], *new[:1], *words[place:]],
            "deleted": [*words[:place], *words[place + 1 :]],
        }
        for name, edited_words in variants.items():
            edited = probe.texts.of(edited_words)
            answer = probe.ask(edited)
            probe.equal_cold(edited, answer, f"words {name} at word {place}")
            if name == "replaced":
                probe.no_words_of([original], edited, answer, f"words that were replaced at word {place}")
        probe.equal(first, probe.ask(original), f"the text before the edits at word {place}")
