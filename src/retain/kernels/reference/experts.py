"""Experts in torch: the definition of what a router chooses, and of the sum of the chosen experts."""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.experts import Experts, Router
from retain.kernels.reference.rows import activate, linear
from retain.kernels.weights.weight import Weight, unpack


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


def mix_experts(x: Tensor, scores: Tensor, w: Experts) -> Tensor:
    """Return the weighted sums [T, E] of the experts that `scores` [T, n] choose for the rows x [T, E]."""
    chosen, weights = route(scores, w.router)
    total = torch.zeros_like(x)
    for e in sorted(set((chosen - w.first).flatten().tolist()) & set(range(w.num_experts))):
        tokens, ranks = torch.where(chosen == e + w.first)
        hidden = _apply(x[tokens], w.gate_up, w.gate_up_bias, e, w.inner_size)
        activated = activate(hidden, w.act, w.intermediate_size, gated=w.is_gated)
        y = _apply(activated, w.down, w.down_bias, e, x.shape[1])
        total = total.index_add(0, tokens, y * weights[tokens, ranks, None].to(y.dtype))
    return total


def _apply(x: Tensor, weight: Weight, bias: Tensor | None, expert: int, n: int) -> Tensor:
    """Compute the linear layer of one expert, whose weights are rows `expert` n and following."""
    rows = slice(expert * n, (expert + 1) * n)
    return linear(x, unpack(weight)[rows], None if bias is None else bias[rows])
