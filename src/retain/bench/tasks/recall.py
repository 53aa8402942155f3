"""recall: facts hidden in essays: one sentence (the needle), a pass key, one of several keys.

An answer counts where greedy decoding would have given it, once it has begun. Prompts are raw text.
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
    """What was hidden."""

    kind: str = ""


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[RecallItem]:
    """n questions, kinds in turn, in haystacks of about `longest` tokens; facts lie at even depths."""
    essays = llm.encode("\n\n".join(r["text"] for r in load_records(data, "paul_graham_essays", 12)))
    rng, found = random.Random(0), []
    for i in range(num_items):
        kind, depth = KINDS[i % 3], (i // 3 % 9 + 0.5) / 9
        facts, question, answer, told = _make_puzzle(kind, rng)
        room = max(max_prompt_len - 30 * len(facts) - 40, 1)
        start = rng.randrange(max(len(essays) - room, 1))
        hay = llm.tokenizer.decode(essays[start : start + room]).split(". ")
        for j, fact in enumerate(facts):
            at = depth if len(facts) == 1 else (j + 0.5) / len(facts)
            hay.insert(round(at * len(hay)), fact)
        answer_ids, told_ids = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (answer, told))
        prompt = llm.encode(". ".join(hay) + f".\n\n{question}\n")
        found.append(RecallItem(prompt, answer_ids + told_ids, num_scored_tokens=len(told_ids), kind=kind))
    return found


def _make_puzzle(kind: str, rng: random.Random) -> tuple[list[str], str, str, str]:
    """Facts to hide, a question, how its answer begins, and what has to be known."""
    number = str(rng.randrange(10_000, 100_000))
    if kind == "passkey":
        fact = f"The pass key is {number}. Remember it. {number} is the pass key"
        return [fact], "What is the pass key?", "The pass key is", f" {number}"
    if kind == "needle":
        who, place = rng.choice(PEOPLE), rng.choice(PLACES)
        begun = f"{who} hid the silver coin behind the"
        return [f"{begun} {place}"], f"Where did {who} hide the silver coin?", begun, f" {place}"
    numbers = {who: str(rng.randrange(10_000, 100_000)) for who in PEOPLE[:4]}
    who = rng.choice(list(numbers))
    begun = f"The key of {who} is"
    return (
        [f"The key of {w} is {k}" for w, k in numbers.items()],
        f"What is the key of {who}?",
        begun,
        f" {numbers[who]}",
    )


def measure(
    llm: LLM, items: list[RecallItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], Any]:
    """Whether the answer would have been given, by kind, and its loss."""
    rows, memory = teacher_force(llm, list(items), policy_specs, full_state, compares_full=False)
    return [{items[i % len(items)].kind: row["exact"], "loss": row["loss"]} for i, row in enumerate(rows)], memory
