"""The definition of what an attention's parameters do to the products of queries and keys.

Plain torch, and differentiable. The products are the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retain.kernels.attention_params import AttentionParams

ALL_HEADS = slice(None)


def adjust_scores(x: Tensor, distance: Tensor, params: AttentionParams, heads: slice = ALL_HEADS) -> Tensor:
    """Return the scores of products x [heads, T, S] = scale q.k of some query heads, before the mask.

    `distance` [T, S] is the position of each slot less that of the query.
    """
    if params.softcap is not None:
        x = params.softcap * torch.tanh(x / params.softcap)
    if params.alibi_slopes is not None:
        x = x + params.alibi_slopes[heads, None, None] * distance
    return x


def softmax(x: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the weights of slots with scores x [..., S]; those of a row that sees none are 0.

    `sink_logits` [..., 1] take part, and their weights are left out.
    """
    if sink_logits is None:
        return torch.softmax(x, -1).nan_to_num(0.0)  # a row of -inf has weights of NaN
    return torch.softmax(torch.cat((x, sink_logits.expand(*x.shape[:-1], 1)), -1), -1)[..., :-1]
