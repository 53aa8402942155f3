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

from retain.bench.tasks import Row
from retain.kv import policies
from retain.kv.budget import BudgetPolicy
from retain.llm import LLM

Floats = NDArray[np.float64]
FULL = "full"


@dataclass
class Results:
    """Rows of one task: rows[policy][item] = {metric: number}; `budgets` says what each policy text stands for."""

    task: str
    metrics: tuple[str, ...]
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def values(self, policy: str, metric: str) -> tuple[Floats, Floats]:
        """Of every item that has the metric: under the policy, and under the full cache."""
        pairs = [(a[metric], b[metric]) for a, b in zip(self.rows[policy], self.rows[FULL], strict=True) if metric in a]
        a, b = np.array(pairs).reshape(-1, 2).T
        return a, b

    def summary(self) -> list[dict[str, Any]]:
        """For every policy and metric: mean, difference from full, and the interval of the difference."""
        found = []
        for policy in self.rows:
            for metric in self.metrics:
                a, b = self.values(policy, metric)
                if len(a):
                    lo, hi = bootstrap(a - b)
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


def bootstrap(differences: Floats, resamples: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the mean."""
    rng = np.random.default_rng(0)
    drawn = differences[rng.integers(len(differences), size=(resamples, len(differences)))].mean(-1)
    lo, hi = np.quantile(drawn, (0.025, 0.975))
    return float(lo), float(hi)


def spell(name: str, budget: str) -> str:
    """h2o:value=norm at 25 % -> h2o:budget=25%,value=norm. Raises ValueError."""
    head, _, rest = name.partition(":")
    return policies.to_spec(policies.parse(f"{head}:budget={budget}" + (f",{rest}" if rest else "")))


def choose(names: str, budgets: str) -> list[str]:
    """Every policy (separated by spaces) at every budget (by commas); one that has its budget already as it is.

    Raises ValueError.
    """
    found = []
    for name in names.split():
        if name.startswith(("full", "ring")) or "budget=" in name:
            found.append(policies.to_spec(policies.parse(name)))
        else:
            found += [spell(name, b.strip()) for b in budgets.split(",")]
    return [p for p in dict.fromkeys(found) if p != FULL]


def families(chosen: Iterable[str]) -> list[list[str]]:
    """Policies that can share a prompt's computation, side by side; full alone, and first."""
    found: dict[Any, list[str]] = {FULL: []}
    for policy in chosen:
        parsed = policies.parse(policy)
        found.setdefault(parsed.score_key if isinstance(parsed, BudgetPolicy) else policy, []).append(policy)
    return [family for family in found.values() if family]


def engine_policy(chosen: Sequence[str]) -> str:
    """The policy to start an engine with, so that it keeps the masses that all of these want."""
    parsed = [policies.parse(p) for p in chosen]
    wants = [p for p, q in zip(chosen, parsed, strict=True) if isinstance(q, BudgetPolicy) and q.per_query_head]
    return wants[0] if wants else FULL


@dataclass(frozen=True)
class Asked:
    """Tasks, the folder of their files, how many items of each, and how many tokens an item may have."""

    tasks: Sequence[ModuleType]
    data: Path
    n: int
    longest: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"items must be at least 1, not {self.n}")

    def items(self, llm: LLM, task: ModuleType) -> list[Any]:
        """Of one task. Raises ValueError where there is none."""
        try:
            found: list[Any] = task.items(llm, self.data, self.n, self.longest)
        except KeyError as key:
            raise ValueError(f"{_name(task)}: a record in {self.data} has no {key}") from None
        if not found:
            raise ValueError(f"{_name(task)}: no item has at most {self.longest} tokens")
        return found

    def example(self, llm: LLM) -> list[int]:
        """The prompt of the first item of all."""
        ids: list[int] = self.items(llm, self.tasks[0])[0].prompt
        return ids


def run(llm: LLM, asked: Asked, chosen: Sequence[str], out: Path | None) -> Iterator[Results]:
    """The results of each task. Where there is a folder `out`, everything measured is in its JSON files at once."""
    for task in asked.tasks:
        name, items = _name(task), asked.items(llm, task)
        results = Results(name, task.METRICS, {p: [] for p in (FULL, *chosen)})
        together = families(results.rows)
        at_once = max(1, llm.config.max_requests // (task.ROWS * max(map(len, together))))
        with tqdm(total=len(items) * len(results.rows), desc=name, unit="item") as bar:
            for start in range(0, len(items), at_once):
                group, memory = items[start : start + at_once], None
                for family in together:
                    rows, kept = task.measure(llm, group, family, memory)
                    memory = memory or kept  # the full cache's comes first
                    for j, policy in enumerate(family):
                        results.rows[policy] += rows[j * len(group) : (j + 1) * len(group)]
                    bar.update(len(rows))
                if out:
                    (out / f"{name}.json").write_text(json.dumps(results.rows), encoding="utf-8")
        yield results


def _name(task: ModuleType) -> str:
    return task.__name__.rpartition(".")[2]


def table(results: Results) -> str:
    """A line for each policy: the mean of each metric and, below full, how far it is from it."""
    width = max(map(len, results.rows))
    found = {(s["policy"], s["metric"]): s for s in results.summary()}
    used = [m for m in results.metrics if (FULL, m) in found]
    lines = [f"{results.task:{width}}  " + "  ".join(f"{m:>34}" for m in used)]
    for policy in results.rows:
        cells = []
        for metric in used:
            s = found[policy, metric]
            lo, hi = s["interval"]
            off = "" if policy == FULL else f" {s['less_full']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
            cells.append(f"{s['mean']:.3f}{off}".rjust(34))
        lines.append(f"{policy:{width}}  " + "  ".join(cells))
    return "\n".join(lines)
