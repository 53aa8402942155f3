"""The table and the picture of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retain.bench.plots import import_pyplot
from retain.tune.bound import Bound, Interval
from retain.tune.candidates import Candidate


@dataclass(frozen=True)
class Line:
    """What is known of a candidate: its share of the full cache's memory, and its excess over `num_items` prompts."""

    spec: str
    kv_bytes: float
    memory: float
    excess: Interval
    num_items: int
    holds: bool


@dataclass(frozen=True)
class Report:
    """What a search found. `best` is None where no candidate holds the bound."""

    bound: Bound
    best: Candidate | None
    num_items: int
    lines: Sequence[Line]

    def to_json(self) -> dict[str, Any]:
        """Return an object of numbers and texts."""
        best = asdict(self.best) if self.best else None
        return {
            "bound": asdict(self.bound),
            "best": best,
            "num_items": self.num_items,
            "lines": [*map(asdict, self.lines)],
        }

    def to_table(self) -> str:
        """Return a line for each candidate, the least memory first."""
        width = max(len(line.spec) for line in self.lines)
        head = f"{'policy':{width}}  {'memory':>7} {'KV MiB':>7}  {self._excess_name:>30}  prompts"
        rows = [head]
        for line in self.lines:
            e = line.excess
            cell = f"{e.mean:.4f} [{e.low:.4f}, {e.high:.4f}]"
            mark = "  <- smallest" if self.best and line.spec == self.best.spec else "  holds" if line.holds else ""
            size = f"{line.memory:>7.0%} {line.kv_bytes / 2**20:>7.1f}"
            rows.append(f"{line.spec:{width}}  {size}  {cell:>30}  {line.num_items:>7}{mark}")
        return "\n".join(rows)

    def refusal(self) -> str:
        """Say in one line that nothing holds the bound, and how near the nearest came."""
        nearest = min(self.lines, key=lambda line: (line.num_items < self.num_items, line.excess.high))
        e = nearest.excess
        return (
            f"no policy holds {self._excess_name} <= {self.bound.limit:g} on {nearest.num_items} prompts; the nearest, "
            f"{nearest.spec}, has {e.mean:.4f} [{e.low:.4f}, {e.high:.4f}]: try larger --budgets or other --policies"
        )

    @property
    def _excess_name(self) -> str:
        names = {"kl": "KL", "loss": "loss above full", "top1": "1 - top1", "rouge": "ROUGE-L below full"}
        return names[self.bound.metric] + (", share" if self.bound.is_relative else "")

    def plot(self, out: Path) -> None:
        """Draw quality against memory, and the bound, as PNG. Raises ValueError where matplotlib is missing."""
        plt = import_pyplot()
        figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
        for i, name in enumerate(dict.fromkeys(_without_budget(line.spec) for line in self.lines)):
            points = [line for line in self.lines if _without_budget(line.spec) == name]
            x = [100 * p.memory for p in points]
            y = [p.excess.mean for p in points]
            errors = [p.excess.mean - p.excess.low for p in points], [p.excess.high - p.excess.mean for p in points]
            axes.errorbar(x, y, errors, label=name, marker="osD^v<>pPX*h"[i % 12], markersize=4, capsize=2)
        axes.axhline(self.bound.limit, color="black", linestyle="--", linewidth=1, label="bound")
        if self.best:
            best = next(line for line in self.lines if self.best and line.spec == self.best.spec)
            axes.plot(100 * best.memory, best.excess.mean, "o", markersize=13, fillstyle="none", color="black")
        axes.set(xlabel="KV memory, % of the full cache's", ylabel=self._excess_name, yscale="symlog")
        axes.set_yscale("symlog", linthresh=self.bound.limit)
        axes.legend(fontsize=7)
        figure.savefig(out, dpi=120)
        plt.close(figure)


def _without_budget(spec: str) -> str:
    name, _, options = spec.partition(":")
    rest = ",".join(o for o in options.split(",") if not o.startswith("budget="))
    return f"{name}:{rest}" if rest else name
