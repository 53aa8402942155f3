"""Write a page of what `retain bench quality` measured: a table of each task, and a picture of each metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from retain.bench.plots import Json, plot_quality
from retain.bench.quality import FULL, QualityResults

PAGE = "report.md"
EXPLANATION = """Numbers are means over items; in brackets is the difference from the full cache with its 95 %
interval. Memory is that of K and V, as a share of the full cache's. Tokens a second are those that were
computed: policies that share the computation of a prompt have one figure.
"""


def write_report(folder: Path, model: str, results: Sequence[QualityResults]) -> Path:
    """Write the page and its pictures into a folder, over those of an earlier call. Returns the page."""
    parts = [f"# KV policies on {model}\n", EXPLANATION]
    for found in results:
        lines = found.summarize()
        parts += [f"## {found.task}\n", "\n".join(_table(found, lines)) + "\n"]
        parts += [f"![{picture.stem}]({picture.name})\n" for picture in plot_quality(lines, folder)]
    page = folder / PAGE
    page.write_text("\n".join(parts), encoding="utf-8")
    return page


def _table(results: QualityResults, lines: Sequence[Json]) -> Iterator[str]:
    """Yield the lines of a table with a row for each column of the results."""
    by_key = {(line["policy"], line["metric"]): line for line in lines}
    metrics = [metric for metric in results.metrics if (FULL, metric) in by_key]
    yield f"| policy | memory | {' | '.join(metrics)} | tokens a second |"
    yield "|---" * (len(metrics) + 3) + "|"
    for policy in results.item_metrics:
        memory = results.memory(policy)
        share = "-" if memory is None else f"{memory:.1%}"
        cells = [_cell(by_key[policy, metric]) for metric in metrics]
        yield f"| `{policy}` | {share} | {' | '.join(cells)} | {results.tokens_per_second(policy):,.0f} |"


def _cell(line: Json) -> str:
    if line["policy"] == FULL:
        return f"{line['mean']:.3f}"
    low, high = line["ci95"]
    return f"{line['mean']:.3f} ({line['diff_from_full']:+.3f}, {low:+.3f} to {high:+.3f})"
