"""What a simulation says: a line of figures, a table, and a plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retain.engine.request import Request
from tools.plots import plt
from tools.simulation.simulator import Cluster

Line = dict[str, Any]
COLUMNS = {  # of the table: title and format
    "replicas": ("replicas", "8d"),
    "tiers": ("tiers", "12s"),
    "routing": ("routing", "13s"),
    "hit_rate": ("hit rate", "8.3f"),
    "ttft_p50_ms": ("TTFT p50", "8.0f"),
    "ttft_p99_ms": ("p99 ms", "8.0f"),
    "output_throughput": ("tokens/s", "9.1f"),
    "utilization": ("busy", "6.0%"),
    "read_mb": ("read MB", "9.0f"),
}

PLOTTED = {  # metrics: title and scale
    "hit_rate": ("hit rate", "linear"),
    "ttft_p50_ms": ("TTFT p50, ms", "log"),
    "ttft_p99_ms": ("TTFT p99, ms", "log"),
}


def summarize(cluster: Cluster, requests: Sequence[Request], tier_setting: str, routing: str) -> Line:
    """Return the figures of a simulation that has ended."""
    prompt_tokens = sum(len(r.prompt) for r in requests)
    ttft_ms = [1e3 * (r.stats.first_token_time - r.stats.arrival_time) for r in requests]
    duration_s = max(r.stats.finish_time for r in requests)
    loaded = dict.fromkeys(("local", "shared"), 0)
    for replica in cluster.replicas:
        for kind, n in replica.cache.num_loaded_tokens.items():
            loaded[kind] += n
    read = {kind: sum(t.num_read_bytes for t in cluster.tiers if t.kind == kind) for kind in loaded}
    return {
        "replicas": len(cluster.replicas),
        "tiers": tier_setting,
        "routing": routing,
        "requests": len(requests),
        "hit_rate": round(sum(r.stats.num_cached_tokens for r in requests) / prompt_tokens, 4),
        **{f"hit_rate_{kind}": round(n / prompt_tokens, 4) for kind, n in loaded.items()},
        "ttft_p50_ms": round(float(np.quantile(ttft_ms, 0.5)), 1),
        "ttft_p99_ms": round(float(np.quantile(ttft_ms, 0.99)), 1),
        "duration_s": round(duration_s, 2),
        "output_throughput": round(sum(r.num_output_tokens for r in requests) / duration_s, 2),
        "utilization": round(sum(r.busy_seconds for r in cluster.replicas) / len(cluster.replicas) / duration_s, 4),
        "preemptions": sum(r.stats.num_preemptions for r in requests),
        "read_mb": round(sum(read.values()) / 1e6, 1),
        **{f"{kind}_read_mb": round(n / 1e6, 1) for kind, n in read.items()},
        "written_mb": round(sum(t.num_written_bytes for t in cluster.tiers) / 1e6, 1),
    }


def format_header() -> str:
    """Return the titles of the table."""
    return "  ".join(f"{title:{'<' if spec[-1] == 's' else '>'}{_width(spec)}}" for title, spec in COLUMNS.values())


def format_row(line: Line) -> str:
    """Return a line as a row of the table; of tiers it has the kinds only."""
    shown = line | {"tiers": re.sub(":[^+]*", "", line["tiers"])}
    return "  ".join(f"{shown[name]:{spec}}" for name, (_, spec) in COLUMNS.items())


def _width(spec: str) -> str:
    return spec.rstrip("dsf%").partition(".")[0]


def plot_replicas(lines: Sequence[Line], out: Path) -> Path:
    """Plot hit rate and time to first token over the number of replicas; a column of plots for each tier setting."""
    settings = list(dict.fromkeys(line["tiers"] for line in lines))
    shape, size = (len(PLOTTED), len(settings)), (4 * len(settings), 8)
    figure, axes = plt.subplots(*shape, figsize=size, constrained_layout=True, sharex=True, sharey="row", squeeze=False)
    for column, setting in zip(axes.T, settings, strict=True):
        shown = [line for line in lines if line["tiers"] == setting]
        for axis, (metric, (title, scale)) in zip(column, PLOTTED.items(), strict=True):
            _plot_metric(axis, shown, metric)
            axis.set_yscale(scale)
            axis.set_ylabel(title)
            axis.label_outer()
        column[0].set_title(setting, fontsize=8)
        column[-1].set_xlabel("replicas")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(out / "cluster.png", dpi=120)
    plt.close(figure)
    return out / "cluster.png"


def _plot_metric(axis: Any, lines: Sequence[Line], metric: str) -> None:
    """Draw a line for each routing policy."""
    for i, routing in enumerate(dict.fromkeys(line["routing"] for line in lines)):
        points = [(line["replicas"], line[metric]) for line in lines if line["routing"] == routing]
        axis.plot(*zip(*points, strict=True), label=routing, marker="osD^v<>pPX*h"[i % 12], markersize=4)
    axis.set_xscale("log", base=2)
