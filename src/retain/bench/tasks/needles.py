"""Task `needles`: one fact in essays of several lengths, asked after the essays were evicted to their budget.

Lengths are an eighth, a quarter, half and all of `max_prompt_len`; a metric is a length as a share of it. Depths are
even. After the needle in a haystack of Kamradt (2023), whose picture of lengths and depths presses are shown by.
"""

from __future__ import annotations

import random
from pathlib import Path

from retain.bench.documents import Document, Question
from retain.bench.documents import measure_later as measure
from retain.bench.tasks import load_essays
from retain.bench.tasks.recall import hide_facts, make_puzzle
from retain.llm import LLM

__all__ = ["METRICS", "REQUESTS_PER_ITEM", "load_items", "measure"]

LENGTHS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1/1": 1.0}
METRICS = ("mean", *LENGTHS)
REQUESTS_PER_ITEM = 1
NUM_DEPTHS = 9


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[Document]:
    """Return essays with a question about their fact: each length in turn, then the next depth."""
    essays = load_essays(llm, data, 12)
    rng = random.Random(0)
    return [_make_document(llm, essays, i, max_prompt_len, rng) for i in range(num_items)]


def _make_document(llm: LLM, essays: list[int], i: int, max_prompt_len: int, rng: random.Random) -> Document:
    kind = [*LENGTHS][i % len(LENGTHS)]
    depth = (i // len(LENGTHS) % NUM_DEPTHS + 0.5) / NUM_DEPTHS
    puzzle = make_puzzle("passkey", rng)
    text = hide_facts(llm, essays, puzzle.facts, [depth], int(LENGTHS[kind] * max_prompt_len), rng)
    asked = llm.tokenizer.encode(f"{puzzle.question}\n{puzzle.begun}", add_special_tokens=False)
    return Document(llm.encode(f"{text}\n\n"), (Question(kind, asked, ((puzzle.rest,),)),))
