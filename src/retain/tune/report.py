"""The table of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retain.tune.bound import Bound, Interval


@dataclass(frozen=True)
class Candidate:
    """A policy's spec, and the mean bytes of KV cache that a request owns while it decodes."""

    spec: str
    kv_bytes: float


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
