"""Plots as PNG: quality against budget, kept positions, speed-ups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retain.bench.quality import FULL, QualityResults, bootstrap_interval


def import_pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw without a screen. Raises ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'retain[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_metrics(results: QualityResults, out: Path) -> list[Path]:
    """Plot each metric over the memory of K and V, a line for each policy and dtype.

    Bars are the intervals of differences from the full cache.
    """
    plt = import_pyplot()
    made = []
    for metric in results.metrics:
        whole, _ = results.paired_values(FULL, metric)
        curves: dict[str, list[tuple[float, float, float, float]]] = {}
        for column in results.item_metrics:
            memory = results.memory(column)
            a, b = results.paired_values(column, metric)
            if len(a) and memory is not None and column != FULL:
                lo, hi = bootstrap_interval(a - b)
                name = re.sub("budget=[^, ]*,?", "", column).replace(": ", " ").rstrip(":")
                curves.setdefault(name, []).append((100 * memory, a.mean(), b.mean() + lo, b.mean() + hi))
        if not curves:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
        for i, (name, points) in enumerate(curves.items()):
            x, y, lo, hi = np.array(sorted(points)).T
            axes.errorbar(x, y, (y - lo, hi - y), label=name, marker="osD^v<>pPX*h"[i % 12], markersize=4, capsize=2)
        axes.axhline(whole.mean(), color="black", linestyle="--", linewidth=1, label=FULL)
        axes.set(xlabel="memory of K and V, % of the full cache's", ylabel=metric, title=results.task)
        axes.legend(fontsize=7)
        made.append(out / f"{results.task}-{metric.replace(' ', '-')}.png")
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made


def plot_kept_positions(
    kept_positions: dict[str, list[list[list[int]]]], num_prompt_tokens: int, out: Path
) -> list[Path]:
    """Plot the positions that each policy keeps of a prompt, given as [policy][layer][head]; two files.

    Layer by position (the share of the layer's heads that keep it), and head by position for the middle layer.
    """
    plt = import_pyplot()
    made = []
    for title in ("layer", "head"):
        size = (10, 1 + 1.6 * len(kept_positions))
        figure, axes = plt.subplots(
            len(kept_positions), 1, figsize=size, constrained_layout=True, sharex=True, squeeze=False
        )
        for (policy, layers), axis in zip(kept_positions.items(), axes[:, 0], strict=True):
            if title == "layer":
                image = np.zeros((len(layers), num_prompt_tokens))
                for i, heads in enumerate(layers):
                    for positions in heads:
                        image[i, positions] += 1 / len(heads)
            else:
                heads = layers[len(layers) // 2]
                image = np.zeros((len(heads), num_prompt_tokens))
                for g, positions in enumerate(heads):
                    image[g, positions] = 1
            axis.imshow(image, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
            axis.set(ylabel=title, title=policy)
        axes[-1, 0].set(xlabel="position")
        made.append(out / f"kept-{title}.png")
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made


def plot_speedups(results: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Plot speed-ups over k, a line for each drafter and workload, and over the context, a line for each drafter."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {"k": {}, "context": {}}
    for line in results:
        name = re.sub(r"[:,]k=\d+", "", line["drafter"])
        k = re.search(r"[:,]k=(\d+)", line["drafter"])
        if k:
            curves["k"].setdefault(f"{name}, {line['workload']}", []).append((int(k[1]), line["speedup"]))
        if line["workload"].startswith("books-"):
            context = int(line["workload"].partition("-")[2])
            curves["context"].setdefault(line["drafter"], []).append((context, line["speedup"]))
    plt = import_pyplot()
    made = []
    for axis, found in curves.items():
        several = {name: sorted(points) for name, points in found.items() if len(points) > 1}
        if not several:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
        for i, (name, points) in enumerate(several.items()):
            axes.plot(*zip(*points, strict=True), label=name, marker="osD^v<>pPX*h"[i % 12], markersize=4)
        axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain")
        axes.set(xlabel=axis if axis == "k" else "tokens of context", ylabel="speed-up over plain decoding")
        axes.legend(fontsize=7)
        made.append(out / f"speculate-{axis}.png")
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made
