"""Verification: drafted tokens are accepted or not, so that every token is distributed as the target's (Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318, algorithm 2).

In the paper's letters: K tokens were drafted from p, the target says q. What is not known here: who drafted, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UniformSampler = Callable[[], float]  # numbers in [0, 1)


def rejection_sample(q: Tensor, p: Tensor, drafts: Sequence[int], next_uniform: UniformSampler) -> list[int]:
    """The drafts that are accepted, and one token more.

    q [K + 1, V]: the target's distributions after 0 .. K drafts; p [K, V]: those that the drafts were drawn from.
    """
    which = to_device_like(q, drafts)[:, None]
    target, draft = torch.stack([x[: len(drafts)].gather(1, which)[:, 0] for x in (q, p)]).tolist()  # [K] both
    for i in range(len(drafts)):
        if next_uniform() * draft[i] >= target[i]:  # accepted with probability min(1, q / p)
            return [*drafts[:i], sample_one(residual(q[i], p[i]), next_uniform)]
    return [*drafts, sample_one(q[len(drafts)], next_uniform)]


def verify_deterministic(q: Tensor, drafts: Sequence[int], uniforms: Sequence[float]) -> list[int]:
    """The same for drafts that were certain: p = 1 where they are.

    Accepting x with probability q(x), and else drawing from q without x, is drawing from q and looking whether it is x:
    with the uniform numbers that come next, [K + 1], as many as without drafts, and the same tokens.
    """
    return verify_greedy(sample_inverse_cdf(q, uniforms).tolist(), drafts)


def verify_greedy(target_tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The greedy limit: the drafts that the target would have said, and what it says then. likeliest [K + 1]."""
    n = next((i for i, x in enumerate(drafts) if x != target_tokens[i]), len(drafts))
    return [*drafts[:n], target_tokens[n]]


def residual(q: Tensor, p: Tensor) -> Tensor:
    """(q - p)+, normalised: what the target has left where the draft said more than enough. [V]."""
    left = (q - p).clamp(min=0)
    total = left.sum()
    return torch.where(total > 0, left / total, q)  # else they are equal but for rounding: nothing is ever rejected


def sample_one(q: Tensor, next_uniform: UniformSampler) -> int:
    """A token of a distribution [V]."""
    return int(sample_inverse_cdf(q[None], [next_uniform()])[0])


def sample_inverse_cdf(p: Tensor, uniforms: Sequence[float]) -> Tensor:
    """One token for each row of p [n, V], by inverting its distribution at u [n] in [0, 1) -> int64 [n]."""
    c = p.double().cumsum(-1)
    tokens = torch.searchsorted(c, (to_device_like(c, uniforms, c.dtype) * c[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[1] - 1 - p.flip(-1).ne(0).int().argmax(-1)  # rounding must not draw an impossible token
    return torch.minimum(tokens, last)


def to_device_like(x: Tensor, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host where x is; nobody waits."""
    return torch.tensor(values, dtype=dtype).to(x.device, non_blocking=True)
