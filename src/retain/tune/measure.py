"""Measure policies on a user's prompts, each beside the full cache on the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retain.bench.quality import FULL, group_policies
from retain.bench.tasks import ForcedItem, ItemMetrics, teacher_force
from retain.llm import LLM
from retain.processing.examples import Example
from retain.sampling_params import SamplingParams
from retain.tune.journal import Journal

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
        """Measure what is not known of the first items under these policies and under the full cache."""
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
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ValueError("rouge needs the rouge-score package: pip install 'retain[bench]'") from None
    return RougeScorer(["rougeL"], use_stemmer=True)
