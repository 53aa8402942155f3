"""choice: COPA, PIQA and OpenBookQA, without examples and with five: the likeliest of the answers that are given.

Prompts as the lm-eval harness writes them; an answer's likelihood is the sum over its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retain.bench.tasks import ItemMetrics, load_records
from retain.llm import LLM

Record = dict[str, Any]
NUM_SHOTS = (0, 5)
REQUESTS_PER_ITEM = 4


def format_copa(r: Record) -> tuple[str, list[str]]:
    """Which is the cause, or the effect?"""
    link = {"cause": "because", "effect": "therefore"}[r["question"]]
    choices = [r["choice1"], r["choice2"]]
    return f"{r['premise'].strip()[:-1]} {link}", [f" {c[0].lower()}{c[1:]}" for c in choices]


def format_piqa(r: Record) -> tuple[str, list[str]]:
    """Which way reaches the goal?"""
    return f"Question: {r['goal']}\nAnswer:", [f" {r['sol1']}", f" {r['sol2']}"]


def format_openbookqa(r: Record) -> tuple[str, list[str]]:
    """Which ending is true?"""
    return r["question_stem"], [f" {c}" for c in r["choices"]]


DATASETS: dict[str, tuple[str, Callable[[Record], tuple[str, list[str]]]]] = {
    "copa": ("copa", format_copa),
    "piqa": ("piqa_valid", format_piqa),
    "openbookqa": ("openbookqa", format_openbookqa),
}
METRICS = tuple(f"{name}-{shots}" for name in DATASETS for shots in NUM_SHOTS)


@dataclass(frozen=True)
class MultipleChoiceItem:
    """`metric` says of which set it is and with how many examples."""

    metric: str
    prompt: list[int]
    choices: list[list[int]]
    label: int


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[MultipleChoiceItem]:
    """n questions: sets and numbers of examples in turn; the first five records are the examples."""
    found = []
    each = -(-num_items // len(METRICS))
    made = {name: [DATASETS[name][1](r) for r in load_records(data, DATASETS[name][0], 5 + each)] for name in DATASETS}
    labels = {name: [r["label"] for r in load_records(data, DATASETS[name][0], 5 + each)] for name in DATASETS}
    for i in range(5, min(5 + each, *map(len, made.values()))):
        for name in DATASETS:
            for shots in NUM_SHOTS:
                examples = [f"{made[name][j][0]}{made[name][j][1][labels[name][j]]}\n\n" for j in range(shots)]
                prompt, choices = made[name][i]
                ids = [llm.tokenizer.encode(c, add_special_tokens=False) for c in choices]
                found.append(
                    MultipleChoiceItem(f"{name}-{shots}", llm.encode("".join(examples) + prompt), ids, labels[name][i])
                )
    return found[:num_items]


def measure(
    llm: LLM, items: list[MultipleChoiceItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], None]:
    """1 where the right answer is the likeliest, else 0."""
    asked = [(q.prompt, c, policy) for policy in policy_specs for q in items for c in q.choices]
    sums = iter([sum(x) for x in llm.score(*map(list, zip(*asked, strict=True)))])  # type: ignore[arg-type]
    rows = []
    for q in [*items] * len(policy_specs):
        likely = [next(sums) for _ in q.choices]
        rows.append({q.metric: float(likely.index(max(likely)) == q.label)})
    return rows, None
