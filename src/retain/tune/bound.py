"""A bound on quality, and whether measurements hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retain.bench.quality import bootstrap_interval
from retain.bench.tasks import ItemMetrics

FORMS = "kl=0.02, loss=1%, loss=0.02, top1=0.95 or rouge=0.98"
LEVEL = 0.98  # of the interval: its upper end is exceeded once in a hundred times
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over items, and its bootstrap interval (Efron, 1979)."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Bound:
    """A limit on the mean of an item's `excess`, which is 0 for the full cache."""

    metric: str  # kl, loss, top1 or rouge
    limit: float  # of the excess
    is_relative: bool  # to the mean of the full cache

    @property
    def needs_answers(self) -> bool:
        """Whether the policies answer by themselves, in place of being scored on a given answer."""
        return self.metric == "rouge"

    def interval(self, items: Sequence[ItemMetrics], full: Sequence[ItemMetrics]) -> Interval:
        """Return the mean excess of paired items. The same items give the same interval."""
        found, whole = (np.array([item[self.metric] for item in rows]) for rows in (items, full))
        excess = found - whole if self.metric in ("kl", "loss") else whole - found
        if self.is_relative:
            excess = excess / max(float(whole.mean()), 1e-9)
        return Interval(float(excess.mean()), *bootstrap_interval(excess, RESAMPLES, LEVEL))


def parse_bound(text: str) -> Bound:
    """Parse the bound that --within states, such as kl=0.01. Raises ValueError."""
    metric, _, number = text.partition("=")
    is_percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        value = -1.0
    if metric in ("kl", "loss") and value > 0 and (metric == "loss" or not is_percent):
        return Bound(metric, value, is_relative=is_percent)
    if metric in ("top1", "rouge") and 0 < value < 1:
        return Bound(metric, 1 - value, is_relative=metric == "rouge")
    raise ValueError(f"--within {text}: not a bound such as {FORMS}")
