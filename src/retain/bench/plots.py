"""Draw quality against memory, for `retain bench quality --report` and tools/plots.py. Needs matplotlib."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws without a screen
import matplotlib.pyplot as plt
import numpy as np

Json = dict[str, Any]
Point = tuple[float, float, float, float]  # x, y, and the ends of y's interval
MARKERS = "osD^v<>pPX*h"


def plot_quality(lines: Sequence[Json], out: Path) -> list[Path]:
    """Draw each metric of each task over the memory of K and V; bars are intervals of the difference from full."""
    made = []
    for task, metric in dict.fromkeys((line["task"], line["metric"]) for line in lines):
        found = [line for line in lines if (line["task"], line["metric"]) == (task, metric)]
        (full,) = (line["mean"] for line in found if line["policy"] == "full")
        curves = defaultdict[str, list[Point]](list)
        for line in found:
            if line["memory"] is not None and line["policy"] != "full":
                low, high = (full + end for end in line["ci95"])
                curves[without_budget(line["policy"])].append((100 * line["memory"], line["mean"], low, high))
        if curves:
            axes = draw_intervals(curves, "memory of K and V, % of the full cache's", metric)
            axes.axhline(full, color="black", linestyle="--", linewidth=1, label="full")
            axes.set_title(task)
            made.append(save(axes, out / f"{task}-{metric.replace(' ', '-')}.png"))
    return made


def draw_intervals(curves: Mapping[str, list[Point]], x_label: str, y_label: str) -> Any:
    """Return axes with a line for each policy, and a bar at each point."""
    _, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for i, (name, points) in enumerate(curves.items()):
        x, y, low, high = np.array(sorted(points)).T
        axes.errorbar(x, y, (y - low, high - y), label=name, marker=MARKERS[i % 12], markersize=4, capsize=2)
    axes.set(xlabel=x_label, ylabel=y_label)
    return axes


def without_budget(spec: str) -> str:
    """Return a policy's spec without its budget: the name of its curve."""
    return re.sub("budget=[^, ]*,?", "", spec).replace(": ", " ").rstrip(":")


def save(axes: Any, file: Path) -> Path:
    """Write the figure of these axes, with a legend where something is named."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)
    axes.figure.savefig(file, dpi=120)
    plt.close(axes.figure)
    return file
