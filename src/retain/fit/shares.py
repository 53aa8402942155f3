"""Learn how many tokens each head keeps, and report how well heads do by it: `retain fit --budgets`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from retain.fit.config import FitConfig
from retain.fit.evaluation import HeldOut, Share, hold_out, kl_divergence
from retain.fit.reading import HELD_OUT_EVERY, Reading
from retain.kv.eviction.gate_weights import Gate, load_gate, read_header, save_gate
from retain.kv.eviction.head_shares import BUDGETS, HeadShares
from retain.kv.eviction.operations import allocate_budgets

RECENT = 0.3  # of h2o's budget


@dataclass(frozen=True)
class SharesReport:
    """What was learned. `kl` is of h2o, by `share` and budget, over the prompts held out; empty without answers."""

    num_fitted: int
    num_held_out: int
    lowest: float  # share of the mean head that a head keeps at a quarter
    highest: float
    kl: dict[str, list[float]]

    @property
    def has_gained(self) -> bool:
        """Whether h2o loses less with shares than without, or nobody knows."""
        none, fitted = [*self.kl.values()] or ([1.0], [0.0])
        return sum(fitted) < sum(none)


class ShareCounter:
    """Count what heads keep where all of them divide one budget by what answers need (AdaKV, arXiv 2407.11550)."""

    def __init__(self) -> None:
        self.sums = torch.zeros(())
        self.num_texts = 0

    def add(self, target: Tensor) -> None:
        """Count one text, of which each token was needed as much as `target` [M, G, n] says."""
        n = target.shape[-1]
        counts = [allocate_budgets(target, max(int(b * n), 1), "all") for b in BUDGETS]
        self.sums = self.sums + torch.stack(counts) / n
        self.num_texts += 1

    def solve(self) -> HeadShares:
        """Return the mean of all texts."""
        return HeadShares((self.sums / self.num_texts).float())


def fit_shares(path: Path, config: FitConfig) -> SharesReport:
    """Learn the shares of the model at `path`, and write them to `config.out`. Raises ValueError or OSError.

    A file that is there keeps its gates.
    """
    if config.out.exists():
        read_header(config.out)  # raises before the model is loaded
    reading = Reading(path, config)
    before = load_gate(config.out, reading.shape) if config.out.exists() else Gate()
    counter = ShareCounter()
    held: list[tuple[HeldOut, Tensor]] = []
    for example, found, is_held_out in reading:
        if not is_held_out:
            counter.add(found.target)
        elif example.answer:
            held.append((hold_out(reading.model, example), found.mass))
    shares = counter.solve()
    notes = {f"shares_{name}": note for name, note in reading.notes.items()}
    save_gate(config.out, replace(before, shares=shares), reading.shape, before.notes | notes)
    kl: dict[str, list[float]] = {}
    ways: dict[str, Share] = {"none": "none", "fitted": shares} if held else {}
    for name, share in ways.items():
        items = tqdm(held, desc=f"share={name}", unit="prompt")
        found_kl = [[kl_divergence(reading.model, x, mass, b, RECENT, share) for b in BUDGETS] for x, mass in items]
        kl[f"h2o, share={name}"] = torch.tensor(found_kl).mean(0).tolist()
    quarter = shares.kept[BUDGETS.index(0.25)] / 0.25
    num_held_out = len(reading.examples) // HELD_OUT_EVERY
    return SharesReport(counter.num_texts, num_held_out, float(quarter.min()), float(quarter.max()), kl)
