"""Rejection sampling of drafts: every token is distributed as the target's (Chen et al., "Accelerating Large Language
Model Decoding with Speculative Sampling", arXiv 2302.01318, algorithm 2).

Letters as in the paper: K tokens were drafted from distributions p, and the target has distributions q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retain.kernels.transfers import to_device_like

UniformSampler = Callable[[], float]  # numbers in [0, 1)


def rejection_sample(q: Tensor, p: Tensor, drafts: Sequence[int], next_uniform: UniformSampler) -> list[int]:
    """Return the accepted drafts, and one token more.

    q [K + 1, V] are the target's distributions after 0 .. K drafts; p [K, V] those that the drafts were sampled from.
    """
    index = to_device_like(q, drafts)[:, None]
    target, draft = torch.stack([x[: len(drafts)].gather(1, index)[:, 0] for x in (q, p)]).tolist()  # [K] both
    for i in range(len(drafts)):
        if not next_uniform() * draft[i] < target[i]:  # accepted with probability min(1, q / p); never where p is NaN
            return [*drafts[:i], sample_one(residual(q[i], p[i]), next_uniform)]
    return [*drafts, sample_one(q[len(drafts)], next_uniform)]


def verify_deterministic(q: Tensor, drafts: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """Return the accepted ones of drafts that were certain (p = 1), and one token more.

    Accepting x with probability q(x), and else sampling q without x, equals sampling q and comparing the result with x.
    So the `uniforms` [K + 1] are those of plain decoding, and give the same tokens.
    """
    return verify_greedy(sample_inverse_cdf(q, uniforms).tolist(), drafts)


def verify_greedy(target_tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the drafts that equal the target's own tokens [K + 1], and the target's token after them."""
    n = next((i for i, x in enumerate(drafts) if x != target_tokens[i]), len(drafts))
    return [*drafts[:n], target_tokens[n]]


def residual(q: Tensor, p: Tensor) -> Tensor:
    """Return the positive part of q - p, normalised, [V]: the distribution of the token after a rejection."""
    excess = (q - p).clamp(min=0)
    total = excess.sum()
    return torch.where(total > 0, excess / total, q)  # total 0: p equals q but for rounding


def sample_one(q: Tensor, next_uniform: UniformSampler) -> int:
    """Sample one token of a distribution [V]."""
    return int(sample_inverse_cdf(q[None], [next_uniform()])[0])


def sample_inverse_cdf(p: Tensor, uniforms: Sequence[float] | Tensor) -> Tensor:
    """Sample one token of each row of p [n, V], by inverting its cumulative distribution at a number in [0, 1).

    Numbers may be float64 on the device of p. Returns int64 [n].
    """
    c = p.double().cumsum(-1)
    at = uniforms if isinstance(uniforms, Tensor) else to_device_like(c, uniforms, c.dtype)
    tokens = torch.searchsorted(c, (at * c[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[1] - 1 - p.flip(-1).ne(0).int().argmax(-1)  # rounding must not give an impossible token
    return torch.minimum(tokens, last)
