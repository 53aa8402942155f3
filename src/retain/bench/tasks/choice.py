"""Task `choice`: accuracy on COPA, PIQA and OpenBookQA, with no examples and with five.

The model chooses the likeliest answer; a likelihood is the sum over the answer's tokens. Prompts are those of the
lm-eval harness.
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
    """Return the prompt and the choices of a COPA record."""
    link = {"cause": "because", "effect": "therefore"}[r["question"]]
    choices = [r["choice1"], r["choice2"]]
    return f"{r['premise'].strip()[:-1]} {link}", [f" {c[0].lower()}{c[1:]}" for c in choices]


def format_piqa(r: Record) -> tuple[str, list[str]]:
    """Return the prompt and the choices of a PIQA record."""
    return f"Question: {r['goal']}\nAnswer:", [f" {r['sol1']}", f" {r['sol2']}"]


def format_openbookqa(r: Record) -> tuple[str, list[str]]:
    """Return the prompt and the choices of an OpenBookQA record."""
    return r["question_stem"], [f" {c}" for c in r["choices"]]


DATASETS: dict[str, tuple[str, Callable[[Record], tuple[str, list[str]]]]] = {
    "copa": ("copa", format_copa),
    "piqa": ("piqa_valid", format_piqa),
    "openbookqa": ("openbookqa", format_openbookqa),
}
METRICS = tuple(f"{name}-{shots}" for name in DATASETS for shots in NUM_SHOTS)


@dataclass(frozen=True)
class MultipleChoiceItem:
    """A question with its choices; `metric` names its data set and the number of examples."""

    metric: str
    prompt: list[int]
    choices: list[list[int]]
    label: int


def load_items(llm: LLM, data: Path, num_items: int, max_prompt_len: int) -> list[MultipleChoiceItem]:
    """Return questions, data sets and numbers of examples in turn; the first five records are the examples."""
    max_shots = max(NUM_SHOTS)
    num_records = max_shots - (-num_items // len(METRICS))
    questions: dict[str, list[tuple[str, list[str], int]]] = {}
    for name, (file, format_record) in DATASETS.items():
        questions[name] = [(*format_record(r), r["label"]) for r in load_records(data, file, num_records)]
    items = []
    for i in range(max_shots, min(num_records, *map(len, questions.values()))):
        for name, solved in questions.items():
            prompt, choices, label = solved[i]
            choice_ids = [llm.tokenizer.encode(c, add_special_tokens=False) for c in choices]
            for num_shots in NUM_SHOTS:
                examples = "".join(f"{p}{c[answer]}\n\n" for p, c, answer in solved[:num_shots])
                items.append(
                    MultipleChoiceItem(f"{name}-{num_shots}", llm.encode(examples + prompt), choice_ids, label)
                )
    return items[:num_items]


def measure(
    llm: LLM, items: list[MultipleChoiceItem], policy_specs: Sequence[str], full_state: Any
) -> tuple[list[ItemMetrics], None]:
    """Return 1 where the right answer is the likeliest, else 0."""
    requests = [(q.prompt, choice, policy) for policy in policy_specs for q in items for choice in q.choices]
    log_probs = iter([sum(x) for x in llm.score(*map(list, zip(*requests, strict=True)))])  # type: ignore[arg-type]
    rows = []
    for q in [*items] * len(policy_specs):
        likelihoods = [next(log_probs) for _ in q.choices]
        rows.append({q.metric: float(likelihoods.index(max(likelihoods)) == q.label)})
    return rows, None
