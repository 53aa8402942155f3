"""Task `recall`: facts hidden in essays: one sentence (the needle), a pass key, one of several keys.

An answer is right if greedy decoding would give it after the answer's first words. Prompts are raw text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.bench.tasks import ForcedItem, ItemMetrics, load_records, teacher_force
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


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[RecallItem]:
    """Return questions, kinds in turn, in haystacks of about `max_prompt_len` tokens; facts lie at even depths."""
    essays = llm.encode("\n\n".join(r["text"] for r in load_records(data, "paul_graham_essays", 12)))
    rng = random.Random(0)
    items = []
    for i in range(num_items):
        kind = KINDS[i % 3]
        depth = (i // 3 % 9 + 0.5) / 9
        facts, question, begun, rest = _make_puzzle(kind, rng)
        room = max(max_prompt_len - 30 * len(facts) - 40, 1)
        start = rng.randrange(max(len(essays) - room, 1))
        sentences = llm.tokenizer.decode(essays[start : start + room]).split(". ")
        for j, fact in enumerate(facts):
            at = depth if len(facts) == 1 else (j + 0.5) / len(facts)
            sentences.insert(round(at * len(sentences)), fact)
        begun_ids, rest_ids = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (begun, rest))
        prompt = llm.encode(". ".join(sentences) + f".\n\n{question}\n")
        items.append(RecallItem(prompt, begun_ids + rest_ids, num_scored_tokens=len(rest_ids), kind=kind))
    return items


def _make_puzzle(kind: str, rng: random.Random) -> tuple[list[str], str, str, str]:
    """Return facts to hide, a question, how its answer begins, and the rest of the answer."""
    number = str(rng.randrange(10_000, 100_000))
    if kind == "passkey":
        fact = f"The pass key is {number}. Remember it. {number} is the pass key"
        return [fact], "What is the pass key?", "The pass key is", f" {number}"
    if kind == "needle":
        person = rng.choice(PEOPLE)
        place = rng.choice(PLACES)
        begun = f"{person} hid the silver coin behind the"
        return [f"{begun} {place}"], f"Where did {person} hide the silver coin?", begun, f" {place}"
    numbers = {person: str(rng.randrange(10_000, 100_000)) for person in PEOPLE[:4]}
    person = rng.choice(list(numbers))
    facts = [f"The key of {p} is {number}" for p, number in numbers.items()]
    return facts, f"What is the key of {person}?", f"The key of {person} is", f" {numbers[person]}"


def measure(
    llm: LLM, items: list[RecallItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Return whether greedy decoding gives the answer, by kind, and its loss."""
    rows, state = teacher_force(llm, list(items), policy_specs, full_state, compares_full=False)
    return [{items[i % len(items)].kind: row["exact"], "loss": row["loss"]} for i, row in enumerate(rows)], state
