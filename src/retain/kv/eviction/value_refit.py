"""Values of kept slots, fitted so that attention over them gives what attention over all slots gave.

The newest queries of a prompt, moved to the position behind it, attend to all slots and to the kept ones. The change of
the kept values is a ridge regression, of each kv head: the less a change does for the outputs, the more it is held
back. After Attention Matching (arXiv 2602.16284), which holds back the values themselves, and so makes them worse where
queries are few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retain.kv.eviction.query_scored import iter_weights
from retain.kv.eviction.view import CacheView

PENALTY = 0.05  # of a changed value, as a share of the mean squared weight of a kept slot, summed over queries
SMALLEST_PENALTY = 1e-12
MOST_LOST = 1 - 1e-6


def fit_values(view: CacheView, kept: Tensor, is_used: Tensor) -> Tensor:
    """Return new values float32 [G, n, V] of the slots `kept` [G, n] of a layer, in tables of S slots.

    Entries of `kept` that are not used [G, n] mean nothing. The view has the queries. A query's outputs are fitted as
    if it was at the view's position.
    """
    v = view.values[0]
    fitted = v.gather(1, kept[..., None].expand(-1, -1, v.shape[-1]))
    places = [slots[used] for slots, used in zip(kept, is_used, strict=True)]
    parts = [_divide(weights, v, places) for weights in iter_weights(view, *view.queries_behind)]
    for g, of_head in enumerate(zip(*parts, strict=True)):
        x, missing = (torch.cat(pieces) for pieces in zip(*of_head, strict=True))
        fitted[g, is_used[g]] += solve_ridge(x, missing)
    return fitted


def _divide(weights: Tensor, v: Tensor, places: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return, of each head, attention over the slots at `places` alone [q, n], and what its outputs lack [q, V].

    `weights` [G, R, m, S] are those of all slots.
    """
    found = []
    for w, values, slots in zip(weights.flatten(1, 2), v, places, strict=True):
        x = w[:, slots]
        lost = (w.sum(1) - x.sum(1)).clamp(0, MOST_LOST)
        x = x / (1 - lost)[:, None]  # a sink's logit keeps its part
        found.append((x, w @ values - x @ values[slots]))
    return found


def solve_ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return w [n, V] with the least |x w - y|^2 + penalty |w|^2, of x [q, n] and y [q, V]."""
    penalty = (PENALTY * x.square().sum() / x.shape[1]).clamp(min=SMALLEST_PENALTY)
    is_wide = x.shape[1] > x.shape[0]  # then the same w comes from a smaller system
    gram = x @ x.T if is_wide else x.T @ x
    factor, info = torch.linalg.cholesky_ex(gram + penalty * torch.eye(len(gram), device=x.device))  # never waits
    w = x.T @ torch.cholesky_solve(y, factor) if is_wide else torch.cholesky_solve(x.T @ y, factor)
    return w.where(info == 0, 0)
