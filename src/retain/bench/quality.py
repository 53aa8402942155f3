"""`retain bench quality`: the quality of KV policies at several budgets, on the same items as the full cache.

Differences from the full cache are paired, item by item. Their 95 % intervals are bootstraps over items (Efron, 1979;
2000 resamples).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from retain.bench.config import QualityBenchConfig
from retain.bench.tasks import ItemMetrics, load_task, task_names
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.llm import LLM

Floats = NDArray[np.float64]
FULL = "full"


@dataclass
class QualityResults:
    """Results of one task: item_metrics[policy][item] = {metric: number}."""

    task: str
    metrics: tuple[str, ...]
    item_metrics: dict[str, list[ItemMetrics]] = field(default_factory=dict)

    def paired_values(self, policy: str, metric: str) -> tuple[Floats, Floats]:
        """Return a metric of every item that has it, under the policy and under the full cache."""
        pairs = [
            (a[metric], b[metric])
            for a, b in zip(self.item_metrics[policy], self.item_metrics[FULL], strict=True)
            if metric in a
        ]
        a, b = np.array(pairs).reshape(-1, 2).T
        return a, b

    def summarize(self) -> list[dict[str, Any]]:
        """Return a line for each policy and metric: its mean, and the difference from full with its interval."""
        lines = []
        for policy in self.item_metrics:
            for metric in self.metrics:
                a, b = self.paired_values(policy, metric)
                if len(a):
                    lo, hi = bootstrap_interval(a - b)
                    lines.append(
                        {
                            "task": self.task,
                            "policy": policy,
                            "metric": metric,
                            "items": len(a),
                            "mean": round(float(a.mean()), 4),
                            "diff_from_full": round(float((a - b).mean()), 4),
                            "ci95": [round(lo, 4), round(hi, 4)],
                        }
                    )
        return lines


def bootstrap_interval(differences: Floats, resamples: int = 2000) -> tuple[float, float]:
    """Return a 95 % interval of the mean."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(len(differences), size=(resamples, len(differences)))].mean(-1)
    lo, hi = np.quantile(means, (0.025, 0.975))
    return float(lo), float(hi)


def load_tasks(names: Sequence[str]) -> list[ModuleType]:
    """Return the tasks of these names; `all` names every task. Raises ValueError."""
    return [load_task(name) for name in (task_names() if tuple(names) == ("all",) else names)]


def policy_at_budget(policy: str, budget: str) -> str:
    """Return a policy's spec with a budget: h2o:value=norm at 25% is h2o:budget=25%,value=norm. Raises ValueError."""
    head, _, rest = policy.partition(":")
    return policies.to_spec(policies.parse(f"{head}:budget={budget}" + (f",{rest}" if rest else "")))


def expand_policies(policy_specs: Iterable[str], budgets: Sequence[str]) -> list[str]:
    """Return each policy at each budget, and a policy that names its budget once. Raises ValueError."""
    expanded = []
    for spec in policy_specs:
        if spec.startswith(("full", "ring")) or "budget=" in spec:
            expanded.append(policies.to_spec(policies.parse(spec)))
        else:
            expanded += [policy_at_budget(spec, budget) for budget in budgets]
    return [p for p in dict.fromkeys(expanded) if p != FULL]


def group_policies(policy_specs: Iterable[str]) -> list[list[str]]:
    """Group the policies that can share the computation of a prompt; full is alone, and first."""
    groups: dict[Any, list[str]] = {FULL: []}
    for spec in policy_specs:
        policy = policies.parse(spec)
        groups.setdefault(policy.score_key if isinstance(policy, BudgetPolicy) else spec, []).append(spec)
    return [group for group in groups.values() if group]


def choose_engine_policy(policy_specs: Sequence[str]) -> str:
    """Return the policy to start an engine with, so that its cache has the score columns that all of these need."""
    for spec in policy_specs:
        policy = policies.parse(spec)
        if isinstance(policy, BudgetPolicy) and policy.per_query_head:
            return spec
    return FULL


def load_items(llm: LLM, config: QualityBenchConfig, task: ModuleType) -> list[Any]:
    """Return the items of a task. Raises ValueError where there is none."""
    try:
        items: list[Any] = task.load_items(llm, config.data_dir, config.num_prompts, config.max_prompt_len)
    except KeyError as key:
        raise ValueError(f"{_task_name(task)}: a record in {config.data_dir} has no {key}") from None
    if not items:
        raise ValueError(f"{_task_name(task)}: no item has at most {config.max_prompt_len} tokens")
    return items


def run(
    llm: LLM, config: QualityBenchConfig, tasks: Sequence[ModuleType], policy_specs: Sequence[str]
) -> Iterator[QualityResults]:
    """Yield the results of each task. Every batch of items updates the JSON files in `config.output_dir`."""
    for task in tasks:
        items = load_items(llm, config, task)
        results = QualityResults(_task_name(task), task.METRICS, {p: [] for p in (FULL, *policy_specs)})
        groups = group_policies(results.item_metrics)
        requests_per_item = task.REQUESTS_PER_ITEM * max(map(len, groups))
        batch_size = max(1, llm.config.max_running_requests // requests_per_item)
        with tqdm(total=len(items) * len(results.item_metrics), desc=results.task, unit="item") as progress:
            for start in range(0, len(items), batch_size):
                batch, full_state = items[start : start + batch_size], None
                for group in groups:
                    rows, state = task.measure(llm, batch, group, full_state)
                    full_state = full_state or state  # the first group is the full cache
                    for j, policy in enumerate(group):
                        results.item_metrics[policy] += rows[j * len(batch) : (j + 1) * len(batch)]
                    progress.update(len(rows))
                if config.output_dir:
                    file = config.output_dir / f"{results.task}.json"
                    file.write_text(json.dumps(results.item_metrics), encoding="utf-8")
        yield results


def _task_name(task: ModuleType) -> str:
    return task.__name__.rpartition(".")[2]


def format_table(results: QualityResults) -> str:
    """Return a row for each policy: the mean of each metric and, below full, the difference with its interval."""
    width = max(map(len, results.item_metrics))
    lines_by_key = {(line["policy"], line["metric"]): line for line in results.summarize()}
    metrics = [m for m in results.metrics if (FULL, m) in lines_by_key]
    rows = [f"{results.task:{width}}  " + "  ".join(f"{m:>34}" for m in metrics)]
    for policy in results.item_metrics:
        cells = []
        for metric in metrics:
            line = lines_by_key[policy, metric]
            lo, hi = line["ci95"]
            difference = "" if policy == FULL else f" {line['diff_from_full']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
            cells.append(f"{line['mean']:.3f}{difference}".rjust(34))
        rows.append(f"{policy:{width}}  " + "  ".join(cells))
    return "\n".join(rows)
