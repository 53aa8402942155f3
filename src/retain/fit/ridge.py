"""Ridge regression in closed form from sums of products, so that no example is held for it.

For each layer and kv head: columns are standardized, the penalty of a coefficient is `penalty` of its column in units
of one row's variance, and the bias is free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.fit.statistics import TARGET_FLOOR, Statistics
from retain.kv.eviction.gate_weights import NUM_LOGS, GateWeights

LINEAR_PENALTY = 0.02  # of key and value columns, times the number of rows
LOG_PENALTY = 1.0  # of the columns of logarithms


class Moments:
    """Sums of products of [columns, log target, 1] over tokens, float64 [M, G, C + 2, C + 2]."""

    def __init__(self, k_dim: int) -> None:
        """`k_dim` columns are those of keys; the next ones are of values."""
        self.k_dim = k_dim
        self.sums: Tensor | None = None

    def add(self, found: Statistics) -> None:
        """Add the tokens of a prompt."""
        y = (found.target + TARGET_FLOOR).log()[..., None]
        rows = torch.cat((found.columns, y, torch.ones_like(y)), -1).double()
        products = rows.transpose(-1, -2) @ rows
        self.sums = products if self.sums is None else self.sums + products

    def solve(self) -> GateWeights:
        """Fit the gate to the recorded sums by ridge regression, and return its weights."""
        assert self.sums is not None
        N = self.sums[..., -1, -1]  # [M, G]
        mean = self.sums[..., -1] / N[..., None]  # [M, G, C + 2]
        cov = self.sums / N[..., None, None] - mean[..., None] * mean[..., None, :]
        deviation = cov.diagonal(dim1=-2, dim2=-1)[..., :-2].clamp(min=1e-12).sqrt()  # [M, G, C]
        xx = cov[..., :-2, :-2] / deviation[..., None] / deviation[..., None, :]
        xy = cov[..., :-2, -2] / deviation
        penalty = torch.full_like(deviation, LINEAR_PENALTY)
        penalty[..., -NUM_LOGS:] = LOG_PENALTY / N[..., None]
        w = torch.linalg.solve(xx + torch.diag_embed(penalty), xy) / deviation
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
