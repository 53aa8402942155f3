"""A file of measurements, from which a run that was stopped continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retain.bench.tasks import ItemMetrics


class Journal:
    """Metrics by policy and item, [spec][item], and the model's own answers by item; on disk where there is a path.

    The first line says what is measured: the model, its options and the data. Raises ValueError where it differs.
    """

    def __init__(self, path: Path | None, subject: dict[str, Any]):
        self.path = path
        self.metrics: dict[str, dict[int, ItemMetrics]] = {}
        self.answers: dict[int, list[int]] = {}
        if path and path.exists() and path.stat().st_size:
            self._read(path, subject)
        else:
            self._append({"subject": subject})

    def add_metrics(self, spec: str, item: int, metrics: ItemMetrics) -> None:
        """Record what a policy did on an item. Metrics of the same pair are merged."""
        self.metrics.setdefault(spec, {}).setdefault(item, {}).update(metrics)
        self._append({"policy": spec, "item": item, "metrics": metrics})

    def add_answer(self, item: int, answer: list[int]) -> None:
        """Record the answer that the model gives with the full cache."""
        self.answers[item] = answer
        self._append({"item": item, "answer": answer})

    def has(self, spec: str, item: int, metric: str) -> bool:
        """Whether the metric of the pair is known."""
        return metric in self.metrics.get(spec, {}).get(item, {})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self, path: Path, subject: dict[str, Any]) -> None:
        text = path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            found = lines[0]["subject"]
            for line in lines[1:]:
                if "answer" in line:
                    self.answers[line["item"]] = line["answer"]
                else:
                    self.metrics.setdefault(line["policy"], {}).setdefault(line["item"], {}).update(line["metrics"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"{path}: not a journal of retain tune, or damaged") from None
        if found != subject:
            differs = ", ".join(k for k in subject if found.get(k) != subject[k])
            raise ValueError(f"{path}: measured with another {differs or 'subject'}: give another --journal")
        if rest:  # a line that was being written when the run was stopped
            path.write_text(whole + "\n", encoding="utf-8")
