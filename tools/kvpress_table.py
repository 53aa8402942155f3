"""Print policies beside presses of kvpress as a table: KL, loss, most likely tokens and RULER at several budgets.

    python -m tools.kvpress_table retain=OURS kvpress=PEER [--budgets 50%,25%,12.5%]

OURS is a folder of `retain bench quality --output-dir`, PEER one of `tools/kvpress_peer.py`. A row is a policy or a
press, a cell its means at the budgets, with half of their 95 % intervals (bootstrap over items). Loss and RULER are
differences from the full cache of the same engine. Items are those that all have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from retain.bench.quality import FULL, bootstrap_interval
from retain.bench.tasks import ItemMetrics

Columns = Mapping[str, Sequence[ItemMetrics]]
METRICS = (  # a task, its metric, the heading
    ("fidelity", "kl", "KL"),
    ("fidelity", "loss", "loss"),
    ("fidelity", "top1_agreement", "most likely token"),
    ("ruler_ask_later", "mean", "RULER"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line about the full cache of each engine, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", metavar="ENGINE=FOLDER")
    parser.add_argument("--budgets", default="50%,25%,12.5%")
    args = parser.parse_args(argv)
    engines = {}
    for result in args.results:
        name, _, folder = result.partition("=")
        engines[name] = {file.stem: json.loads(file.read_text()) for file in Path(folder).glob("*.json")}
    keep_common_items(engines.values())
    print("\n".join([*describe_full(engines), "", *format_rows(engines, args.budgets.split(","))]))


def keep_common_items(engines: Collection[dict[str, dict[str, list[ItemMetrics]]]]) -> None:
    """Shorten all columns of a task to the items that every one of them has."""
    for task in {task for tasks in engines for task in tasks}:
        columns = [tasks[task] for tasks in engines if task in tasks]
        length = min(len(rows) for c in columns for rows in c.values())
        for c in columns:
            c.update({spec: rows[:length] for spec, rows in c.items()})


def describe_full(engines: Mapping[str, Mapping[str, Columns]]) -> list[str]:
    """Return what the full cache of each engine has, and of how many items."""
    return [
        f"{engine}, {task}: {len(columns[FULL])} items, full cache {metric} {mean(columns[FULL], metric):.4f}"
        for engine, tasks in engines.items()
        for task, metric in (("fidelity", "loss"), ("ruler_ask_later", "mean"))
        if (columns := tasks.get(task))
    ]


def format_rows(engines: Mapping[str, Mapping[str, Columns]], budgets: Sequence[str]) -> list[str]:
    """Return the lines of the table, without metrics of tasks that no engine ran."""
    metrics = [m for m in METRICS if any(m[0] in tasks for tasks in engines.values())]
    lines = [
        "| engine | policy | " + " | ".join(heading for _, _, heading in metrics) + " |",
        "|---" * (2 + len(metrics)) + "|",
    ]
    for engine, tasks in engines.items():
        names = dict.fromkeys(without_budget(c) for columns in tasks.values() for c in columns if c != FULL)
        for name in names:
            cells = [
                " / ".join(format_cell(tasks.get(task, {}), name, budget, metric) for budget in budgets)
                for task, metric, _ in metrics
            ]
            lines.append(f"| {engine} | {name} | " + " | ".join(cells) + " |")
    return lines


def without_budget(column: str) -> str:
    """Return a spec without its budget: h2o:budget=25%,value=norm is h2o:value=norm."""
    name, _, options = column.partition(":")
    rest = ",".join(option for option in options.split(",") if not option.startswith("budget="))
    return f"{name}:{rest}" if rest else name


def format_cell(columns: Columns, name: str, budget: str, metric: str) -> str:
    """Return a mean with half of its interval, or a dash where it was not measured."""
    found = [c for c in columns if f"budget={budget}" in c.replace(",", ":").split(":") and without_budget(c) == name]
    if not found:
        return "-"
    values = np.array([row[metric] for row in columns[found[0]]])
    if metric != "top1_agreement":  # KL is 0 under the full cache
        values = values - [row[metric] for row in columns[FULL]]
    low, high = bootstrap_interval(values)
    digits = 0 if metric == "mean" else 3
    return f"{values.mean():.{digits}f} ±{(high - low) / 2:.{digits}f}"


def mean(rows: Sequence[ItemMetrics], metric: str) -> float:
    """Return the mean of a metric."""
    return float(np.mean([row[metric] for row in rows]))


if __name__ == "__main__":
    main()
