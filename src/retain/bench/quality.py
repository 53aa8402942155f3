"""`retain bench quality`: the quality of KV policies at several budgets and precisions, beside the full cache's.

A column is a policy, or a policy and the dtype of K and V where that is another than the first engine's:
"h2o:budget=25%", "h2o:budget=25% int8".

Differences from the full cache are paired, item by item. Their 95 % intervals are bootstraps over items (Efron, 1979;
2000 resamples).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from retain.bench.config import QualityBenchConfig
from retain.bench.tasks import ItemMetrics, load_task, task_names
from retain.kernels.slots.pool_dtypes import pool_dtype
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AUTO, check_spec
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.memory.group_pages import mean_slot_bytes
from retain.llm import LLM
from retain.plugins import parse_spec

Floats = NDArray[np.float64]
FULL = "full"


@dataclass
class QualityResults:
    """Results of one task: item_metrics[column][item] = {metric: number}."""

    task: str
    metrics: tuple[str, ...]
    item_metrics: dict[str, list[ItemMetrics]] = field(default_factory=dict)
    slot_bytes: dict[str, float] = field(default_factory=dict)  # by dtype; "" is the first engine's
    demoted_slot_bytes: float = 0
    num_tokens: Counter[str] = field(default_factory=Counter)  # computed, by column
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def tokens_per_second(self, column: str) -> float:
        """Return the computed tokens a second; columns that share the computation of prompts have one figure."""
        return self.num_tokens[column] / max(self.seconds[column], 1e-9)

    def memory(self, column: str) -> float | None:
        """Return the bytes of K and V as a share of the full cache's, None for a budget in tokens."""
        policy, dtype = split_column(column)
        parsed = policies.parse(policy)
        if policy == FULL:
            return self.slot_bytes[dtype] / self.slot_bytes[""]
        if not isinstance(parsed, BudgetPolicy) or not parsed.budget.fraction:
            return None
        kept = parsed.budget.fraction
        demoted = 0.0
        if demote := parsed.modes.demote:
            demoted = demote.amount.fraction if demote.amount else 1 - kept
        return (kept * self.slot_bytes[dtype] + demoted * self.demoted_slot_bytes) / self.slot_bytes[""]

    def frontier(self, metric: str) -> list[str]:
        """Return the columns of which none has less memory and a smaller mean, least memory first."""
        found: list[str] = []
        sized = [(m, self.paired_values(c, metric)[0].mean(), c) for c in self.item_metrics if (m := self.memory(c))]
        best = np.inf
        for _, mean, column in sorted(sized):
            if mean < best:
                found = [*found, column]
                best = mean
        return found

    def paired_values(self, column: str, metric: str) -> tuple[Floats, Floats]:
        """Return a metric of every item that has it, in a column and under the full cache."""
        pairs = [
            (a[metric], b[metric])
            for a, b in zip(self.item_metrics[column], self.item_metrics[FULL], strict=True)
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
                    memory = self.memory(policy)
                    lines.append(
                        {
                            "task": self.task,
                            "policy": policy,
                            "memory": None if memory is None else round(memory, 4),
                            "metric": metric,
                            "items": len(a),
                            "mean": round(float(a.mean()), 4),
                            "diff_from_full": round(float((a - b).mean()), 4),
                            "ci95": [round(lo, 4), round(hi, 4)],
                            "tokens_per_second": round(self.tokens_per_second(policy), 1),
                        }
                    )
        return lines


def bootstrap_interval(differences: Floats, resamples: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of a level around the mean."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(len(differences), size=(resamples, len(differences)))].mean(-1)
    lo, hi = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(lo), float(hi)


def load_tasks(names: Sequence[str]) -> list[ModuleType]:
    """Return the tasks of these names; `all` names every task. Raises ValueError."""
    return [load_task(name) for name in (task_names() if tuple(names) == ("all",) else names)]


def policy_at_budget(policy: str, budget: str) -> str:
    """Return a policy's spec with a budget: h2o:value=norm at 25% is h2o:budget=25%,value=norm. Raises ValueError."""
    head, _, rest = policy.partition(":")
    return _checked(f"{head}:budget={budget}" + (f",{rest}" if rest else ""))


def _checked(spec: str) -> str:
    """Return the spec without options at their defaults; one of `auto` as it is. Raises ValueError."""
    policy = check_spec(spec)
    return spec if parse_spec(spec)[0] == AUTO else policies.to_spec(policy)


def expand_policies(policy_specs: Iterable[str], budgets: Sequence[str]) -> list[str]:
    """Return each policy at each budget, and a policy that names its budget once. Raises ValueError.

    `auto` stays until a model is loaded: `choose_policies`.
    """
    expanded = []
    for spec in policy_specs:
        if "budget=" in spec or not (parse_spec(spec)[0] == AUTO or policies.takes_budget(spec)):
            expanded.append(_checked(spec))
        else:
            expanded += [policy_at_budget(spec, budget) for budget in budgets]
    return [p for p in dict.fromkeys(expanded) if p != FULL]


def choose_policies(llm: LLM, policy_specs: Iterable[str]) -> list[str]:
    """Return the policies that specs stand for on a model, each once."""
    auto = llm.input_processor.info.auto
    return list(dict.fromkeys(policies.to_spec(policies.parse(auto.choose(spec))) for spec in policy_specs))


def group_policies(policy_specs: Iterable[str]) -> list[list[str]]:
    """Group the policies that can share the computation of a prompt; full is alone, and first."""
    groups: dict[Any, list[str]] = {FULL: []}
    for spec in policy_specs:
        policy = policies.parse(spec)
        groups.setdefault(policy.score_key if isinstance(policy, BudgetPolicy) else spec, []).append(spec)
    return [group for group in groups.values() if group]


def possible_policies(policy_specs: Sequence[str], kv_dtype: str) -> list[str]:
    """Return the policies that a cache of this dtype can have: one of 4 bits demotes no token (see factory.py)."""
    can_demote = kv_dtype not in ("k8v4", "int4")
    return [spec for spec in policy_specs if can_demote or not check_spec(spec).modes.demote]


def load_items(llm: LLM, config: QualityBenchConfig, task: ModuleType) -> list[Any]:
    """Return the items of a task. Raises ValueError where there is none."""
    try:
        items: list[Any] = task.load_items(llm, config.data_dir, config.num_prompts, config.max_prompt_len)
    except KeyError as key:
        raise ValueError(f"{_task_name(task)}: a record in {config.data_dir} has no {key}") from None
    if not items:
        raise ValueError(f"{_task_name(task)}: no item has at most {config.max_prompt_len} tokens")
    return items


def split_column(column: str) -> tuple[str, str]:
    """Return the policy of a column, and its dtype of K and V: "" for the first engine's."""
    policy, _, dtype = column.partition(" ")
    return policy, dtype


def run(
    llm: LLM,
    config: QualityBenchConfig,
    tasks: Sequence[ModuleType],
    policy_specs: Sequence[str],
    other_llms: Mapping[str, LLM] | None = None,
) -> Iterator[QualityResults]:
    """Yield the results of each task. Every batch of items updates the JSON files in `config.output_dir`.

    `other_llms` are engines of the same model by the dtype of their K and V. Each runs the full cache and the policies
    that its dtype can have, compared with the full cache of `llm`.
    """
    llms = {"": llm, **(other_llms or {})}
    specs = {dtype: (FULL, *possible_policies(policy_specs, dtype)) for dtype in llms}
    columns = [f"{p} {dtype}".rstrip() for dtype in llms for p in specs[dtype]]
    spec = llm.spec.kv_cache
    slot_bytes = {dtype: mean_slot_bytes(spec, pool_dtype(x.config.slot_dtype)) for dtype, x in llms.items()}
    demoted_slot_bytes = int(mean_slot_bytes(spec, DEMOTED_DTYPE))
    for task in tasks:
        items = load_items(llm, config, task)
        results = QualityResults(
            _task_name(task), task.METRICS, {c: [] for c in columns}, slot_bytes, demoted_slot_bytes
        )
        groups = [(dtype, group) for dtype in llms for group in group_policies(specs[dtype])]
        requests_per_item = task.REQUESTS_PER_ITEM * max(len(group) for _, group in groups)
        batch_size = max(1, llm.config.max_running_requests // requests_per_item)
        with tqdm(total=len(items) * len(results.item_metrics), desc=results.task, unit="item") as progress:
            for start in range(0, len(items), batch_size):
                batch = items[start : start + batch_size]
                full_state = None
                for dtype, group in groups:
                    started = perf_counter()
                    num_before = llms[dtype].engine.num_computed_tokens
                    rows, state = task.measure(llms[dtype], batch, group, full_state)
                    seconds = perf_counter() - started
                    full_state = full_state or state  # the first group is the full cache
                    for j, policy in enumerate(group):
                        column = f"{policy} {dtype}".rstrip()
                        results.item_metrics[column] += rows[j * len(batch) : (j + 1) * len(batch)]
                        results.num_tokens[column] += llms[dtype].engine.num_computed_tokens - num_before
                        results.seconds[column] += seconds
                    progress.update(len(rows))
                if config.output_dir:
                    file = config.output_dir / f"{results.task}.json"
                    file.write_text(json.dumps(results.item_metrics), encoding="utf-8")
        yield results


def _task_name(task: ModuleType) -> str:
    return task.__name__.rpartition(".")[2]


def format_table(results: QualityResults) -> str:
    """Return a row for each column: the mean of each metric and, below full, the difference with its interval.

    Where precisions differ, memory is shown, and the columns that no other beats with less memory.
    """
    shows_memory = len(results.slot_bytes) > 1
    width = max(map(len, results.item_metrics))
    lines_by_key = {(line["policy"], line["metric"]): line for line in results.summarize()}
    metrics = [m for m in results.metrics if (FULL, m) in lines_by_key]
    heading = f"{results.task:{width}}  " + "memory  " * shows_memory
    rows = [heading + "  ".join(f"{m:>34}" for m in metrics)]
    for policy in results.item_metrics:
        cells = []
        for metric in metrics:
            line = lines_by_key[policy, metric]
            lo, hi = line["ci95"]
            difference = "" if policy == FULL else f" {line['diff_from_full']:+.3f} [{lo:+.3f}, {hi:+.3f}]"
            cells.append(f"{line['mean']:.3f}{difference}".rjust(34))
        memory = results.memory(policy)
        share = ("      -  " if memory is None else f"{100 * memory:5.1f}%  ") * shows_memory
        rows.append(f"{policy:{width}}  {share}" + "  ".join(cells))
    for metric in ("kl", "loss") if shows_memory else ():
        if metric in metrics:
            rows.append(f"least {metric} for its memory: " + ", ".join(results.frontier(metric)))
    return "\n".join(rows)
