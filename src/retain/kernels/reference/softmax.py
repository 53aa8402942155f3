"""The definition of what an attention's parameters do to the scores of queries.

Plain torch, and differentiable. The products of scaled queries and keys are the caller's.
"""

from __future__ import annotations

from torch import Tensor

from retain.kernels.attention_params import AttentionParams

ALL_HEADS = slice(None)


def add_biases(x: Tensor, distance: Tensor, params: AttentionParams, heads: slice = ALL_HEADS) -> Tensor:
    """Return the scores of products x [heads, T, S] = scale q.k of some query heads, before the mask.

    `distance` [T, S] is the position of each slot less that of the query.
    """
    if params.alibi_slopes is not None:
        x = x + params.alibi_slopes[heads, None, None] * distance
    return x
