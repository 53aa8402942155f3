"""Measure policies on a user's prompts, each beside the full cache on the same prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retain.bench.quality import FULL, group_policies
from retain.bench.tasks import ForcedItem, ItemMetrics, teacher_force
from retain.llm import LLM
from retain.plugins import needs_extra
from retain.processing.examples import Example
from retain.sampling_params import SamplingParams

TOP1 = "top1_agreement"


@dataclass(frozen=True)
class Measurer:
    """Measure policies on examples, and record everything in a journal.

    `progress` is told how many more pairs of policy and example are known.
    """

    llm: LLM
    examples: Sequence[Example]
    journal: Journal
    metric: str
    progress: Callable[[int], object]
    _counted: set[tuple[str, int]] = field(default_factory=set)

    def measure(self, specs: Sequence[str], num_items: int) -> None:
        """Measure each policy and the full cache on the first `num_items` items, without those measured before."""
        for i in range(num_items):
            missing = [s for s in specs if not self.journal.has(s, i, self.metric)]
            if missing:
                self._measure_item(i, missing)
            pairs = {(s, i) for s in specs} - self._counted
            self._counted.update(pairs)
            self.progress(len(pairs))

    def rows(self, spec: str, num_items: int) -> list[ItemMetrics]:
        """Return the metrics of the first items."""
        return [self.journal.metrics[spec][i] for i in range(num_items)]

    def num_measured(self, spec: str) -> int:
        """Count the first items that are measured without a gap."""
        known = (i for i in range(len(self.examples)) if not self.journal.has(spec, i, self.metric))
        return next(known, len(self.examples))

    def _measure_item(self, i: int, specs: Sequence[str]) -> None:
        size = self.llm.config.max_running_requests
        groups = group_policies([FULL, *specs])
        measure = self._answer if self.metric == "rouge" else self._score
        measure(i, [group[j : j + size] for group in groups for j in range(0, len(group), size)])

    def _score(self, i: int, groups: Sequence[Sequence[str]]) -> None:
        """Force the answer on the model; the first group is the full cache."""
        item = ForcedItem(self.examples[i].prompt, self.examples[i].answer)
        state = None
        for group in groups:
            rows, found = teacher_force(self.llm, [item], group, state, compares_full=True)
            state = state or found
            for spec, row in zip(group, rows, strict=True):
                self.journal.add_metrics(spec, i, {"kl": row["kl"], "loss": row["loss"], "top1": row[TOP1]})

    def _answer(self, i: int, groups: Sequence[Sequence[str]]) -> None:
        """Let the model answer, and compare with the expected answer by ROUGE-L."""
        scorer = rouge_scorer()
        example = self.examples[i]
        reference = self.llm.tokenizer.decode(example.answer)
        params = SamplingParams(max_tokens=len(example.answer), temperature=0, seed=0)
        for group in groups:
            outputs = self.llm.generate([example.prompt] * len(group), params, list(group))
            for spec, output in zip(group, outputs, strict=True):
                score = scorer.score(reference, output.text)["rougeL"].fmeasure
                self.journal.add_metrics(spec, i, {"rouge": score})


def complete_answers(llm: LLM, examples: Sequence[Example], journal: Journal, num_tokens: int) -> list[Example]:
    """Return the examples with the model's own greedy answers where the data has none, of at most `num_tokens`."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, seed=0)
    found = []
    for i, example in enumerate(examples):
        if not example.answer and i not in journal.answers:
            journal.add_answer(i, llm.generate(example.prompt, params, FULL)[0].token_ids)
        found.append(replace(example, answer=example.answer or journal.answers[i]))
    return [e for e in found if len(e.answer) > 1]


def rouge_scorer() -> Any:
    """Return the scorer of ROUGE-L (Lin, 2004). Raises ValueError where the package is missing."""
    with needs_extra("rouge", "bench"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=True)


class Journal:
    """Metrics by policy and item, [spec][item], and the model's own answers by item; on disk where there is a path.

    The first line says what is measured: the model, its options and the data. Raises ValueError where it differs.
    """

    def __init__(self, path: Path | None, subject: dict[str, Any]):
        self.path = path
        self.metrics: dict[str, dict[int, ItemMetrics]] = {}
        self.answers: dict[int, list[int]] = {}
        if path and path.exists() and path.stat().st_size:
            self._read(path, subject)
        else:
            self._append({"subject": subject})

    def add_metrics(self, spec: str, item: int, metrics: ItemMetrics) -> None:
        """Record what a policy did on an item. Metrics of the same pair are merged."""
        self.metrics.setdefault(spec, {}).setdefault(item, {}).update(metrics)
        self._append({"policy": spec, "item": item, "metrics": metrics})

    def add_answer(self, item: int, answer: list[int]) -> None:
        """Record the answer that the model gives with the full cache."""
        self.answers[item] = answer
        self._append({"item": item, "answer": answer})

    def has(self, spec: str, item: int, metric: str) -> bool:
        """Whether the metric of the pair is known."""
        return metric in self.metrics.get(spec, {}).get(item, {})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self, path: Path, subject: dict[str, Any]) -> None:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            found = lines[0]["subject"]
            for line in lines[1:]:
                if "answer" in line:
                    self.answers[line["item"]] = line["answer"]
                else:
                    self.metrics.setdefault(line["policy"], {}).setdefault(line["item"], {}).update(line["metrics"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"{path}: not a journal of retain tune, or damaged") from None
        if found != subject:
            differs = ", ".join(k for k in subject if found.get(k) != subject[k])
            raise ValueError(f"{path}: measured with another {differs or 'subject'}: give another --journal")
        if rest:  # a line that was being written when the run was stopped
            path.write_text(whole + "\n", encoding="utf-8")
