"""Fit a gate for a model, and report what it explains and how well its tokens answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from retain.fit.calibration import Calibration
from retain.fit.config import FitConfig
from retain.fit.dense import DenseModel
from retain.fit.evaluation import HeldOut, Share, hold_out, mean_divergences
from retain.fit.ridge import MASS_COLUMN, Moments, replayed_logs
from retain.fit.shares import ShareCounter
from retain.fit.statistics import Statistics, sum_rereads
from retain.kv.eviction.gate_weights import NUM_LOGS, Gate, GateWeights, save_gate
from retain.processing.examples import Example

# The policies' own defaults.
RECENT = {"gate": 0.15, "gate_replay": 0.15, "reread": 0.3, "h2o": 0.3, "h2o:share=fitted": 0.3}


@dataclass(frozen=True)
class FitReport:
    """What a fit found. `kl` is by policy and budget, over the prompts held out; empty without answers.

    `best`: the policy of the gate that had the lower one. A gate for `gate_replay` is left out where that is `gate`.
    """

    num_fitted: int
    num_held_out: int
    num_weights: int
    r2: float
    r2_by_layer: list[float]
    kl: dict[str, list[float]]
    best: str

    def describe(self, seconds: float) -> str:
        """Return what was fitted, in lines."""
        fitted = f"{self.num_weights} numbers fitted on {self.num_fitted} prompts in {seconds:.0f} s"
        return f"{fitted}\nR2 on {self.num_held_out} other prompts: {self.r2:.3f}"

    def advise(self, out: Path) -> str:
        """Return how to use the file."""
        return f"use it: --kv-policy {self.best}:budget=25%,file={out}"


def fit_gate(path: Path, config: FitConfig) -> FitReport:
    """Fit a gate for the model at `path`, write it to `config.out`. Raises ValueError or OSError."""
    calibration = Calibration(path, config)
    model = calibration.model
    k_dim = model.spec.kv_cache.full_attention_group.k_dim
    moments = Moments(k_dim)
    held_moments = Moments(k_dim)
    counter = ShareCounter()
    held: list[tuple[HeldOut, Statistics]] = []
    for example, found, is_held_out in calibration:
        (held_moments if is_held_out else moments).add(found)
        if not is_held_out:
            counter.add(found.target)
        elif example.answer:
            held.append((hold_out(model, example), found))
    attention = moments.solve()
    gate = Gate(attention, moments.solve_replayed(), counter.solve())
    by_layer, r2 = held_moments.r2(attention)
    kl = _compare(model, gate, held) if held else {}
    if not kl or sum(kl["gate"]) < sum(kl["gate_replay"]):
        gate = replace(gate, replayed=None)
    save_gate(config.out, gate, calibration.shape, {**calibration.notes, "r2": f"{r2:.3f}"})
    num_weights = sum(x.numel() for x in vars(attention).values()) * (2 if gate.replayed else 1)
    best = "gate_replay" if gate.replayed else "gate"
    return FitReport(counter.num_texts, calibration.num_held_out, num_weights, r2, by_layer.tolist(), kl, best)


def score_columns(gate: GateWeights, columns: Tensor) -> Tensor:
    """Return the scores of the columns of `Statistics`, [M, G, n]: what `GateWeights` computes from a cache."""
    weights = torch.cat((gate.key, gate.value, gate.logs), -1)[..., None]  # [M, G, D + V + 5, 1]
    assert columns.shape[-1] == weights.shape[-2]
    return (columns @ weights)[..., 0] + gate.bias[..., None]


def score_replayed(gate: GateWeights, found: Statistics) -> Tensor:
    """Return the scores of the policy `gate_replay` at the end of the prompt, [M, G, n]."""
    columns = found.columns.clone()
    columns[..., MASS_COLUMN] = replayed_logs(found)
    return score_columns(gate, columns)


def _compare(model: DenseModel, gate: Gate, held: list[tuple[HeldOut, Statistics]]) -> dict[str, list[float]]:
    """Return mean KL divergences at each budget.

    Of gates and reread with share=all, the latter with value=norm; of h2o alone and with share=fitted.
    """
    attention = gate.attention
    replayed = gate.replayed
    shares = gate.shares
    assert attention and replayed and shares
    k_dim = model.spec.kv_cache.full_attention_group.k_dim

    def reread_norms(example: Example, found: Statistics) -> Tensor:
        values = found.columns[..., k_dim:-NUM_LOGS]
        return sum_rereads(model, example.prompt, [example.prompt]) * values.norm(dim=-1)

    scorers: dict[str, tuple[Share, Callable[[Example, Statistics], Tensor]]] = {
        "gate": ("all", lambda example, found: score_columns(attention, found.columns)),
        "gate_replay": ("all", lambda example, found: score_replayed(replayed, found)),
        "reread": ("all", reread_norms),
        "h2o": ("none", lambda example, found: found.mass),
        "h2o:share=fitted": (shares, lambda example, found: found.mass),
    }
    kl = {}
    for name, (share, score) in scorers.items():
        items = ((item, score(item.example, found)) for item, found in tqdm(held, desc=name, unit="prompt"))
        kl[name] = mean_divergences(model, items, RECENT[name], share)
    return kl
