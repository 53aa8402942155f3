"""Learn how many tokens each head keeps, and report how well heads do by it: `retain fit --budgets`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from retain.fit.calibration import Calibration
from retain.fit.config import FitConfig
from retain.fit.evaluation import HeldOut, Share, hold_out, mean_divergences
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

    def describe(self, seconds: float) -> str:
        """Return what was learned, in a line."""
        return f"shares of {self.lowest:.2f} to {self.highest:.2f} from {self.num_fitted} prompts, {seconds:.0f} s"

    def advise(self, out: Path) -> str:
        """Return how to use the file, where h2o loses less with its shares, or where there are no answers to tell."""
        none, fitted = [*self.kl.values()] or ([1.0], [0.0])
        if sum(fitted) < sum(none):
            return f"use it: --kv-policy h2o:budget=25%,share=fitted, with {out.name} beside the model"
        return "shares gain nothing on this model: leave share=fitted out"


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
    calibration = Calibration(path, config)
    before = load_gate(config.out, calibration.shape) if config.out.exists() else Gate()
    counter = ShareCounter()
    held: list[tuple[HeldOut, Tensor]] = []
    for example, found, is_held_out in calibration:
        if not is_held_out:
            counter.add(found.target)
        elif example.answer:
            held.append((hold_out(calibration.model, example), found.mass))
    shares = counter.solve()
    notes = {f"shares_{name}": note for name, note in calibration.notes.items()}
    save_gate(config.out, replace(before, shares=shares), calibration.shape, before.notes | notes)
    kl: dict[str, list[float]] = {}
    ways: dict[str, Share] = {"none": "none", "fitted": shares} if held else {}
    for name, share in ways.items():
        items = tqdm(held, desc=f"share={name}", unit="prompt")
        kl[f"h2o, share={name}"] = mean_divergences(calibration.model, items, RECENT, share)
    quarter = shares.kept[BUDGETS.index(0.25)] / 0.25
    return SharesReport(
        num_fitted=counter.num_texts,
        num_held_out=calibration.num_held_out,
        lowest=float(quarter.min()),
        highest=float(quarter.max()),
        kl=kl,
    )
