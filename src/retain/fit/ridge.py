"""Ridge regression in closed form from sums of products, so that no example is held for it.

For each layer and kv head: columns are standardized, the penalty of a coefficient is `penalty` of its column in units
of one row's variance, and the bias is free.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from retain.fit.statistics import TARGET_FLOOR, Statistics
from retain.kv.eviction.gate_weights import MASS_FLOOR, NUM_LOGS, GateWeights

LINEAR_PENALTY = 0.02  # of key and value columns, times the number of rows
LOG_PENALTY = 1.0  # of the columns of logarithms

MASS_COLUMN = -2  # from the end
REPLAYED_WEIGHT = 0.3  # of 0.15, 0.25, 0.3 and 0.4 the best on SmolLM2; 0.25 is about equal


class Moments:
    """Sums of products of [columns, log target, 1] over tokens, float64 [M, G, C + 2, C + 2]."""

    def __init__(self, k_dim: int) -> None:
        """`k_dim` columns are those of keys; the next ones are of values."""
        self.k_dim = k_dim
        self.sums: Tensor | None = None
        self.replayed = torch.zeros(2, dtype=torch.float64)  # sum and number of logarithms of `replayed`

    def add(self, found: Statistics) -> None:
        """Add the tokens of a prompt."""
        y = (found.target + TARGET_FLOOR).log()[..., None]
        rows = torch.cat((found.columns, y, torch.ones_like(y)), -1).double()
        products = rows.transpose(-1, -2) @ rows
        self.sums = products if self.sums is None else self.sums + products
        logs = replayed_logs(found)
        self.replayed += torch.tensor([logs.double().sum(), logs.numel()])

    def solve(self) -> GateWeights:
        """Fit the gate to the recorded sums by ridge regression, and return its weights."""
        assert self.sums is not None
        return self._solve(torch.ones(self.sums.shape[-1] - 2, dtype=torch.float64))

    def solve_replayed(self) -> GateWeights:
        """Fit all but the mass, and give the logarithm of what the prompt's queries give from behind it one weight.

        Where the fit has that logarithm among its columns, it gives the others less, and ranks worse
        (docs/log/budgets.md). The bias takes off the mean of that term.
        """
        assert self.sums is not None
        used = torch.ones(self.sums.shape[-1] - 2, dtype=torch.float64)
        used[MASS_COLUMN] = 0
        weights = self._solve(used)
        weights.logs[..., MASS_COLUMN] = REPLAYED_WEIGHT
        return replace(weights, bias=weights.bias - REPLAYED_WEIGHT * float(self.replayed[0] / self.replayed[1]))

    def _solve(self, used: Tensor) -> GateWeights:
        """Fit the columns that are used [C], 1 or 0."""
        assert self.sums is not None
        N = self.sums[..., -1, -1]  # [M, G]
        mean = self.sums[..., -1] / N[..., None]  # [M, G, C + 2]
        cov = self.sums / N[..., None, None] - mean[..., None] * mean[..., None, :]
        deviation = cov.diagonal(dim1=-2, dim2=-1)[..., :-2].clamp(min=1e-12).sqrt()  # [M, G, C]
        xx = cov[..., :-2, :-2] / deviation[..., None] / deviation[..., None, :] * used * used[:, None]
        xy = cov[..., :-2, -2] / deviation * used
        penalty = torch.full_like(deviation, LINEAR_PENALTY)
        penalty[..., -NUM_LOGS:] = LOG_PENALTY / N[..., None]
        factor = torch.linalg.cholesky(xx + torch.diag_embed(penalty))
        w = torch.cholesky_solve(xy[..., None], factor)[..., 0] / deviation
        bias = mean[..., -2] - (w * mean[..., :-2]).sum(-1)
        w = w.float()
        D = self.k_dim
        return GateWeights(w[..., :D], w[..., D:-NUM_LOGS], w[..., -NUM_LOGS:], bias.float())

    def r2(self, gate: GateWeights) -> tuple[Tensor, float]:
        """Return the share of the variance of the log target that a gate explains: of each layer [M], and of all."""
        assert self.sums is not None
        w = torch.cat((gate.key, gate.value, gate.logs), -1).double()
        ones = torch.ones_like(w[..., :1])
        residual = torch.cat((-w, ones, -gate.bias.double()[..., None]), -1)  # y - w x - bias
        error = (residual[..., None, :] @ self.sums @ residual[..., None])[..., 0, 0]  # [M, G]
        y = self.sums[..., -2, -1]
        yy = self.sums[..., -2, -2]
        N = self.sums[..., -1, -1]
        by_layer = 1 - error.sum(-1) / (yy.sum(-1) - y.sum(-1) ** 2 / N.sum(-1))
        return by_layer, float(1 - error.sum() / (yy.sum() - y.sum() ** 2 / N.sum()))


def replayed_logs(found: Statistics) -> Tensor:
    """Return the logarithms of what a query of the prompt gives from behind it to each token, [M, G, n]."""
    return (found.replayed / found.replayed.shape[-1] + MASS_FLOOR).log()
