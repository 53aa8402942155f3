"""Task `recall`: facts hidden in essays: one sentence (the needle), a pass key, one of several keys.

An answer is right if greedy decoding would give it after the answer's first words. Prompts are raw text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_essays, teacher_force
from retain.llm import LLM

METRICS = ("needle", "passkey", "keys", "loss")
REQUESTS_PER_ITEM = 1
KINDS = ("needle", "passkey", "keys")
PEOPLE = ("Anna", "Bert", "Carla", "David", "Emma", "Frank", "Greta", "Henry")
PLACES = ("museum", "library", "station", "harbour", "market", "theatre", "garden", "bakery")


@dataclass(frozen=True)
class RecallItem(ForcedItem):
    """A question about a hidden fact; `kind` is the metric it counts for."""

    kind: str = ""


@dataclass(frozen=True)
class Puzzle:
    """Facts to hide, a question about one of them, and its answer in two parts: how it begins, and the rest."""

    facts: list[str]
    question: str
    begun: str
    rest: str


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[RecallItem]:
    """Return questions, kinds in turn, in haystacks of about `max_prompt_len` tokens; facts lie at even depths."""
    essays = load_essays(llm, data, 12)
    rng = random.Random(0)
    items = []
    for i in range(num_items):
        kind = KINDS[i % 3]
        puzzle = make_puzzle(kind, rng)
        num_facts = len(puzzle.facts)
        one_depth = [(i // 3 % 9 + 0.5) / 9]
        depths = one_depth if num_facts == 1 else [(j + 0.5) / num_facts for j in range(num_facts)]
        text = hide_facts(llm, essays, puzzle.facts, depths, max_prompt_len, rng)
        begun, rest = (llm.tokenizer.encode(x, add_special_tokens=False) for x in (puzzle.begun, f" {puzzle.rest}"))
        prompt = llm.encode(f"{text}\n\n{puzzle.question}\n")
        items.append(RecallItem(prompt, begun + rest, num_scored_tokens=len(rest), kind=kind))
    return items


def hide_facts(
    llm: LLM, essays: list[int], facts: list[str], depths: list[float], length: int, rng: random.Random
) -> str:
    """Return a part of essays with facts between its sentences, with room for a question in `length` tokens."""
    room = max(length - 30 * len(facts) - 40, 1)
    start = rng.randrange(max(len(essays) - room, 1))
    sentences = llm.tokenizer.decode(essays[start : start + room]).split(". ")
    for depth, fact in zip(depths, facts, strict=True):
        sentences.insert(round(depth * len(sentences)), fact)
    return ". ".join(sentences) + "."


def make_puzzle(kind: str, rng: random.Random) -> Puzzle:
    """Return facts of a kind to hide, and a question about them."""
    number = str(rng.randrange(10_000, 100_000))
    if kind == "passkey":
        fact = f"The pass key is {number}. Remember it. {number} is the pass key"
        return Puzzle([fact], "What is the pass key?", "The pass key is", number)
    if kind == "needle":
        person = rng.choice(PEOPLE)
        place = rng.choice(PLACES)
        begun = f"{person} hid the silver coin behind the"
        return Puzzle([f"{begun} {place}"], f"Where did {person} hide the silver coin?", begun, place)
    numbers = {person: str(rng.randrange(10_000, 100_000)) for person in PEOPLE[:4]}
    person = rng.choice(list(numbers))
    facts = [f"The key of {p} is {number}" for p, number in numbers.items()]
    return Puzzle(facts, f"What is the key of {person}?", f"The key of {person} is", numbers[person])


def measure(
    llm: LLM, items: list[RecallItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Return whether greedy decoding gives the answer, by kind, and its loss."""
    rows, state = teacher_force(llm, list(items), policy_specs, full_state, compares_full=False)
    return [{items[i % len(items)].kind: row["exact"], "loss": row["loss"]} for i, row in enumerate(rows)], state
