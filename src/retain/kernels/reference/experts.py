"""Experts in torch: the definition of what a router chooses, and of the sum of the chosen experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.experts import Experts, Router
from retain.kernels.reference.rows import activate, linear
from retain.kernels.weights.weight import UnpackedWeight


def route(scores: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each token, int64 [T, k], best first, and their weights float32 [T, k].

    `scores` [T, n]. See Router.
    """
    scores = scores.float()
    p = scores.sigmoid() if router.is_sigmoid else scores.softmax(-1)
    chosen_by = p if router.bias is None else p + router.bias
    if router.num_groups > 1:
        groups = chosen_by.view(len(scores), router.num_groups, -1)
        best = groups.topk(min(router.group_best, groups.shape[-1]), -1).values.sum(-1)  # [T, groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, sort_descending(best, router.top_groups), True)
        chosen_by = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = sort_descending(chosen_by, router.top_k)
    weights = p.gather(-1, experts)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + router.sum_epsilon)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[experts]
    return experts, weights * router.scale


def sort_descending(x: Tensor, n: int) -> Tensor:
    """Return the indices int64 [..., n] of the largest numbers of each row, of equal ones the first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :n]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The matrices and biases of experts, unpacked to the dtype of the program."""

    experts: Experts
    gate_up: UnpackedWeight
    down: UnpackedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def mix_experts(x: Tensor, scores: Tensor, w: ExpertWeights) -> Tensor:
    """Return the weighted sums [T, E] of the experts that `scores` [T, n] choose for the rows x [T, E]."""
    width = w.experts.intermediate_size
    chosen, weights = route(scores, w.experts.router)
    total = torch.zeros_like(x)
    for e in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = torch.where(chosen == e)
        hidden = _apply(x[tokens], w.gate_up, w.gate_up_bias, e, w.experts.inner_size)
        activated = activate(hidden, w.experts.act, width, gated=w.experts.is_gated)
        y = _apply(activated, w.down, w.down_bias, e, x.shape[1])
        total = total.index_add(0, tokens, y * weights[tokens, ranks, None].to(y.dtype))
    return total


def _apply(x: Tensor, weight: UnpackedWeight, bias: Tensor | None, expert: int, n: int) -> Tensor:
    """Compute the linear layer of one expert, whose weights are rows `expert` n and following."""
    rows = slice(expert * n, (expert + 1) * n)
    index = torch.arange(rows.start, rows.stop)
    own = weight[rows] if isinstance(weight, Tensor) else weight.select_rows(index)
    return linear(x, own, None if bias is None else bias[rows])
