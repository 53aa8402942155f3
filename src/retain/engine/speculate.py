"""Verification: drafted tokens are accepted or not, so that every token is distributed as the target's (Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318, algorithm 2).

In the paper's letters: K tokens were drafted from p, the target says q. What is not known here: who drafted, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Uniform = Callable[[], float]  # numbers in [0, 1)


def verify(q: Tensor, p: Tensor, drafts: Sequence[int], uniform: Uniform) -> list[int]:
    """The drafts that are accepted, and one token more.

    q [K + 1, V]: the target's distributions after 0 .. K drafts; p [K, V]: those that the drafts were drawn from.
    """
    which = beside(q, drafts)[:, None]
    target, draft = torch.stack([x[: len(drafts)].gather(1, which)[:, 0] for x in (q, p)]).tolist()  # [K] both
    for i in range(len(drafts)):
        if uniform() * draft[i] >= target[i]:  # accepted with probability min(1, q / p)
            return [*drafts[:i], one(residual(q[i], p[i]), uniform)]
    return [*drafts, one(q[len(drafts)], uniform)]


def certain(q: Tensor, drafts: Sequence[int], ahead: Sequence[float]) -> list[int]:
    """The same for drafts that were certain: p = 1 where they are.

    Accepting x with probability q(x), and else drawing from q without x, is drawing from q and looking whether it is x:
    with the uniform numbers that come next, [K + 1], as many as without drafts, and the same tokens.
    """
    return agree(draw(q, ahead).tolist(), drafts)


def agree(likeliest: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The greedy limit: the drafts that the target would have said, and what it says then. likeliest [K + 1]."""
    n = next((i for i, x in enumerate(drafts) if x != likeliest[i]), len(drafts))
    return [*drafts[:n], likeliest[n]]


def residual(q: Tensor, p: Tensor) -> Tensor:
    """(q - p)+, normalised: what the target has left where the draft said more than enough. [V]."""
    left = (q - p).clamp(min=0)
    total = left.sum()
    return torch.where(total > 0, left / total, q)  # else they are equal but for rounding: nothing is ever rejected


def one(q: Tensor, uniform: Uniform) -> int:
    """A token of a distribution [V]."""
    return int(draw(q[None], [uniform()])[0])


def draw(p: Tensor, u: Sequence[float]) -> Tensor:
    """One token for each row of p [n, V], by inverting its distribution at u [n] in [0, 1) -> int64 [n]."""
    c = p.double().cumsum(-1)
    tokens = torch.searchsorted(c, (beside(c, u, c.dtype) * c[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[1] - 1 - p.flip(-1).ne(0).int().argmax(-1)  # rounding must not draw an impossible token
    return torch.minimum(tokens, last)


def beside(x: Tensor, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host where x is; nobody waits."""
    return torch.tensor(numbers, dtype=dtype).to(x.device, non_blocking=True)
