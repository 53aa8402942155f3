"""`retain bench quality`: what forgetting costs. Every policy at every budget on the same items, beside the full cache.

Differences from the full cache are paired, item by item; their intervals are bootstraps over items (Efron, 1979;
2000 resamples, 95 %). What is not known here: what a task asks (tasks/), pictures (plots.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from retain.bench.tasks import ItemMetrics
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.llm import LLM

Floats = NDArray[np.float64]
FULL = "full"


@dataclass
class QualityResults:
    """Rows of one task: rows[policy][item] = {metric: number}; `budgets` says what each policy text stands for."""

    task: str
    metrics: tuple[str, ...]
    item_metrics: dict[str, list[ItemMetrics]] = field(default_factory=dict)

    def paired_values(self, policy: str, metric: str) -> tuple[Floats, Floats]:
        """Of every item that has the metric: under the policy, and under the full cache."""
        pairs = [
            (a[metric], b[metric])
            for a, b in zip(self.item_metrics[policy], self.item_metrics[FULL], strict=True)
            if metric in a
        ]
        a, b = np.array(pairs).reshape(-1, 2).T
        return a, b

    def summarize(self) -> list[dict[str, Any]]:
        """For every policy and metric: mean, difference from full, and the interval of the difference."""
        found = []
        for policy in self.item_metrics:
            for metric in self.metrics:
                a, b = self.paired_values(policy, metric)
                if len(a):
                    lo, hi = bootstrap_interval(a - b)
                    found.append(
                        {
                            "task": self.task,
                            "policy": policy,
                            "metric": metric,
                            "items": len(a),
                            "mean": round(float(a.mean()), 4),
                            "less_full": round(float((a - b).mean()), 4),
                            "interval": [round(lo, 4), round(hi, 4)],
                        }
                    )
        return found


def bootstrap_interval(differences: Floats, resamples: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the mean."""
    rng = np.random.default_rng(0)
    drawn = differences[rng.integers(len(differences), size=(resamples, len(differences)))].mean(-1)
    lo, hi = np.quantile(drawn, (0.025, 0.975))
    return float(lo), float(hi)


def policy_at_budget(policy: str, budget: str) -> str:
    """h2o:value=norm at 25 % -> h2o:budget=25%,value=norm. Raises ValueError."""
    head, _, rest = policy.partition(":")
    return policies.to_spec(policies.parse(f"{head}:budget={budget}" + (f",{rest}" if rest else "")))


def expand_policies(policies_text: str, budgets: str) -> list[str]:
    """Every policy (separated by spaces) at every budget (by commas); one that has its budget already as it is.

    Raises ValueError.
    """
    found = []
    for name in policies_text.split():
        if name.startswith(("full", "ring")) or "budget=" in name:
            found.append(policies.to_spec(policies.parse(name)))
        else:
            found += [policy_at_budget(name, b.strip()) for b in budgets.split(",")]
    return [p for p in dict.fromkeys(found) if p != FULL]


def group_policies(policy_specs: Iterable[str]) -> list[list[str]]:
    """Policies that can share a prompt's computation, side by side; full alone, and first."""
    found: dict[Any, list[str]] = {FULL: []}
    for policy in policy_specs:
        parsed = policies.parse(policy)
        found.setdefault(parsed.score_key if isinstance(parsed, BudgetPolicy) else policy, []).append(policy)
    return [family for family in found.values() if family]


def choose_engine_policy(policy_specs: Sequence[str]) -> str:
    """The policy to start an engine with, so that it keeps the masses that all of these want."""
    parsed = [policies.parse(p) for p in policy_specs]
    wants = [p for p, q in zip(policy_specs, parsed, strict=True) if isinstance(q, BudgetPolicy) and q.per_query_head]
    return wants[0] if wants else FULL


@dataclass(frozen=True)
class QualityBenchConfig:
    """Tasks, the folder of their files, how many items of each, and how many tokens an item may have."""

    tasks: Sequence[ModuleType]
    data: Path
    num_items: int
    max_prompt_len: int

    def __post_init__(self) -> None:
        if self.num_items < 1:
            raise ValueError(f"items must be at least 1, not {self.num_items}")

    def load_items(self, llm: LLM, task: ModuleType) -> list[Any]:
        """Of one task. Raises ValueError where there is none."""
        try:
            found: list[Any] = task.items(llm, self.data, self.num_items, self.max_prompt_len)
        except KeyError as key:
            raise ValueError(f"{_task_name(task)}: a record in {self.data} has no {key}") from None
        if not found:
            raise ValueError(f"{_task_name(task)}: no item has at most {self.max_prompt_len} tokens")
        return found

    def first_prompt(self, llm: LLM) -> list[int]:
        """The prompt of the first item of all."""
        ids: list[int] = self.load_items(llm, self.tasks[0])[0].prompt
        return ids


def run(
    llm: LLM, config: QualityBenchConfig, policy_specs: Sequence[str], out: Path | None
) -> Iterator[QualityResults]:
    """The results of each task. Where there is a folder `out`, everything measured is in its JSON files at once."""
    for task in config.tasks:
        name, items = _task_name(task), config.load_items(llm, task)
        results = QualityResults(name, task.METRICS, {p: [] for p in (FULL, *policy_specs)})
        together = group_policies(results.item_metrics)
        at_once = max(1, llm.config.max_running_requests // (task.ROWS * max(map(len, together))))
        with tqdm(total=len(items) * len(results.item_metrics), desc=name, unit="item") as bar:
            for start in range(0, len(items), at_once):
                group, memory = items[start : start + at_once], None
                for family in together:
                    rows, kept = task.measure(llm, group, family, memory)
                    memory = memory or kept  # the full cache's comes first
                    for j, policy in enumerate(family):
                        results.item_metrics[policy] += rows[j * len(group) : (j + 1) * len(group)]
                    bar.update(len(rows))
                if out:
                    (out / f"{name}.json").write_text(json.dumps(results.item_metrics), encoding="utf-8")
        yield results


def _task_name(task: ModuleType) -> str:
    return task.__name__.rpartition(".")[2]


def format_table(results: QualityResults) -> str:
    """A line for each policy: the mean of each metric and, below full, how far it is from it."""
    width = max(map(len, results.item_metrics))
    found = {(s["policy"], s["metric"]): s for s in results.summarize()}
    used = [m for m in results.metrics if (FULL, m) in found]
    lines = [f"{results.task:{width}}  " + "  ".join(f"{m:>34}" for m in used)]
    for policy in results.item_metrics:
        cells = []
        for metric in used:
            s = found[policy, metric]
            lo, hi = s["interval"]
            off = "" if policy == FULL else f" {s['less_full']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
            cells.append(f"{s['mean']:.3f}{off}".rjust(34))
        lines.append(f"{policy:{width}}  " + "  ".join(cells))
    return "\n".join(lines)
