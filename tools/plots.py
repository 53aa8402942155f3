"""Draw what commands print as JSON: quality against memory, speed-ups, sessions, a gate, and which tokens stay.

retain bench quality ... --json > quality.jsonl; python -m tools.plots quality.jsonl OUT      a picture a metric
retain bench speculate ... --json > lines.jsonl; python -m tools.plots lines.jsonl OUT        over k, over the context
python -m tools.agent_bench ... --json > agent.jsonl; python -m tools.plots agent.jsonl OUT    sessions, and KL
retain tune ... --json > tune.json;              python -m tools.plots tune.json OUT
retain fit ... --json > fit.json;                python -m tools.plots fit.json OUT
python -m tools.plots --kept PROMPT.txt OUT --model smollm2 --policies "h2o:budget=25% sinks:budget=25%"
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from retain.bench.plots import MARKERS, Json, Point, draw_intervals, plot_quality, save, without_budget


def plot(lines: Sequence[Json], out: Path) -> list[Path]:
    """Draw the lines or the object of a command into a folder. Returns the files."""
    first = lines[0]
    if "drafter" in first:
        return plot_speedups(lines, out)
    if "found_share" in first:
        return [plot_sessions(lines, out)]
    if "r2_by_layer" in first:
        return [plot_fit(first, out)]
    return [plot_tuning(first, out)] if "bound" in first else plot_quality(lines, out)


def plot_tuning(found: Json, out: Path) -> Path:
    """Draw quality against memory, with the bound and the smallest policy that holds it."""
    curves = defaultdict[str, list[Point]](list)
    for line in found["lines"]:
        e = line["excess"]
        curves[without_budget(line["spec"])].append((100 * line["memory"], e["mean"], e["low"], e["high"]))
        if found["best"] and line["spec"] == found["best"]["spec"]:
            best = (100 * line["memory"], e["mean"])
    limit = found["bound"]["limit"]
    axes = draw_intervals(curves, "KV memory, % of the full cache's", f"{found['bound']['metric']}, excess over full")
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="bound")
    axes.set_yscale("symlog", linthresh=limit)
    if found["best"]:
        axes.plot(*best, "o", markersize=13, fillstyle="none", color="black")
    return save(axes, out / "tune.png")


def plot_fit(report: Json, out: Path) -> Path:
    """Draw the variance that is explained in each layer, and the distance from the full cache by budget."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), constrained_layout=True)
    left.bar(range(len(report["r2_by_layer"])), report["r2_by_layer"])
    left.set(xlabel="layer without a window", ylabel="R2 on held-out prompts", title=f"R2 {report['r2']:.2f}")
    for name, values in report["kl"].items():
        right.plot([100 / 2 ** (i + 1) for i in range(len(values))], values, marker="o", label=name)
    right.set(xlabel="budget, % of the prompt", ylabel="KL from the full cache, nats a token", yscale="log")
    return save(right, out / "fit.png")


def plot_sessions(lines: Sequence[Json], out: Path) -> Path:
    """Draw what is found of histories over sessions, and the distance from the full cache over memory a session.

    The memory is that of the first method: lines of several runs may be in one file, each with the same --kv-memory.
    """
    _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    runs = [line for line in lines if "found_share" in line]
    methods = list(dict.fromkeys(line["method"] for line in runs))
    most = {m: max((x["sessions"] for x in runs if x["method"] == m and holds(x)), default=0) for m in methods}
    for i, method in enumerate(methods):
        own = sorted((x for x in runs if x["method"] == method), key=lambda x: x["sessions"])
        style = {"label": method, "marker": MARKERS[i % 12], "markersize": 5}
        left.plot([x["sessions"] for x in own], [100 * x["found_share"] for x in own], **style)
        if most[method] and "kl" in own[0]:
            *_, best = (x for x in own if x["sessions"] == most[method])  # the newest, where runs repeat
            low, high = best["kl_ci95"]
            bars = [[best["kl"] - low], [high - best["kl"]]]
            right.errorbar(100 * most[methods[0]] / most[method], best["kl"], bars, capsize=2, **style)
    left.axhline(100 * runs[0]["min_found"], color="black", linestyle="--", linewidth=1)
    left.set(xlabel="sessions at once, at equal memory", ylabel="% of the histories' tokens found cached")
    right.fill_between([0, 25], 0, 0.05, color="tab:green", alpha=0.15)
    right.set(xlabel=f"memory of a session, % of {methods[0]}'s", ylabel="KL from the full cache, nats a token", xlim=0)
    right.set_yscale("symlog", linthresh=0.01)
    right.set_ylim(0, max(0.1, right.get_ylim()[1]))
    left.legend(fontsize=7)
    return save(right, out / "agent.png")


def holds(line: Json) -> bool:
    """Return whether a cache held the sessions of a line: it found nearly all of their histories."""
    return bool(line["found_share"] >= line["min_found"])


def plot_speedups(lines: Sequence[Json], out: Path) -> list[Path]:
    """Draw speed-ups over k, a line for each drafter and workload, and over the context, a line for each drafter."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {"k": defaultdict(list), "context": defaultdict(list)}
    for line in lines:
        name = re.sub(r"[:,]k=\d+", "", line["drafter"])
        if k := re.search(r"[:,]k=(\d+)", line["drafter"]):
            curves["k"][f"{name}, {line['workload']}"].append((int(k[1]), line["speedup"]))
        if line["workload"].startswith("books-"):
            curves["context"][line["drafter"]].append((int(line["workload"][6:]), line["speedup"]))
    made = []
    for axis, found in curves.items():
        if several := {name: sorted(points) for name, points in found.items() if len(points) > 1}:
            _, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
            for i, (name, points) in enumerate(several.items()):
                axes.plot(*zip(*points, strict=True), label=name, marker=MARKERS[i % 12], markersize=4)
            axes.axhline(1, color="black", linestyle="--", linewidth=1, label="plain")
            axes.set(xlabel=axis if axis == "k" else "tokens of context", ylabel="speed-up over plain decoding")
            made.append(save(axes, out / f"speculate-{axis}.png"))
    return made


def plot_kept_positions(kept: Mapping[str, list[list[list[int]]]], num_prompt_tokens: int, out: Path) -> Path:
    """Draw which positions each policy keeps, [policy][layer][head]: the share of a layer's heads that keep each."""
    size = (10, 1 + 1.6 * len(kept))
    _, axes = plt.subplots(len(kept), 1, figsize=size, constrained_layout=True, sharex=True, squeeze=False)
    for (policy, layers), axis in zip(kept.items(), axes[:, 0], strict=True):
        image = np.zeros((len(layers), num_prompt_tokens))
        for i, heads in enumerate(layers):
            for positions in heads:
                image[i, positions] += 1 / len(heads)
        axis.imshow(image, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
        axis.set(ylabel="layer", title=policy)
    axes[-1, 0].set(xlabel="position")
    return save(axes[-1, 0], out / "kept-layer.png")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the names of the pictures."""
    parser = argparse.ArgumentParser(description="draw what commands print as JSON")
    parser.add_argument("file", type=Path, help="JSON, or JSON lines; with --kept a prompt")
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    parser.add_argument("--kept", action="store_true", help="draw which tokens of a prompt policies keep")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policies", default="h2o:budget=25% sinks:budget=25%", help="separated by spaces")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.file.read_text(encoding="utf-8")
    if args.kept:
        from retain import LLM

        llm = LLM(args.model)
        prompt = llm.encode(text)
        kept = {policy: llm.kept_positions(prompt, policy) for policy in args.policies.split()}
        print(plot_kept_positions(kept, len(prompt), args.out))
    else:
        print(*plot([json.loads(line) for line in text.splitlines()], args.out), sep="\n")


if __name__ == "__main__":
    main()
