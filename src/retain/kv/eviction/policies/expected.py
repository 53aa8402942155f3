"""expected: keep the tokens that later queries are expected to attend to (ExpectedAttention, arXiv 2510.00636).

Later queries are taken to be normally distributed, as those of the prompt were before they were rotated. Their mean and
covariance, rotated by the mean rotation of the next positions, give the expected weight of a key in closed form. It is
multiplied by the norm of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from retain.kv.eviction.query_scored import NumQueries, QueryScoredPolicy
from retain.kv.eviction.view import BlockQueries, CacheView
from retain.options import Bounds, NonNegativeInt

MAX_NUMBERS = 2**22  # of rotated unit vectors at a time


@dataclass(frozen=True, kw_only=True)
class Policy(QueryScoredPolicy):
    """Rank by the expected attention of later queries."""

    sinks: NonNegativeInt = 4  # whose queries do not count, either
    queries: NumQueries = 1024  # of the prompt, the newest, whose distribution is taken
    future: Annotated[int, Bounds(1, 4096)] = 512  # positions that later queries are expected at

    @property
    def score_key(self) -> tuple[object, ...]:
        """The sinks, too, which take no part."""
        return *super().score_key, self.sinks

    @property
    def query_blocks(self) -> Sequence[range]:
        """The newest positions of the prompt."""
        n = self.prompt_len
        return [range(max(self._begin, n - self.queries), n)] if n else []

    @property
    def _begin(self) -> int:
        """The first position that takes part: behind the sinks, or the last one of a prompt that they hold."""
        return min(self.sinks, self.prompt_len - 1)

    def score_queries(self, view: CacheView) -> Tensor:
        """Return softmax(mean . k + k . covariance k / 2) |v| of each query head, for slots behind the sinks."""
        assert view.queries
        scale = view.queries.params.scale
        q = view.queries.unrotated  # [G, R, n, D]
        mean = q.mean(2, keepdim=True)
        q = q - mean
        rotation = mean_rotation(view.queries, view.query_position + 1, self.future)
        mean = mean @ rotation  # [G, R, 1, D]
        covariance = rotation.T @ (q.transpose(-1, -2) @ q / q.shape[2]) @ rotation  # [G, R, D, D]
        k = view.keys[0][:, None]  # [G, 1, S, D]
        x = scale * (mean @ k.transpose(-1, -2))[:, :, 0] + scale**2 / 2 * ((k @ covariance) * k).sum(-1)
        weights = x.masked_fill(view.pos[0, :, None] < self._begin, -torch.inf).softmax(-1)
        return weights * view.values[0].norm(dim=-1)[:, None] / q.shape[1]


def mean_rotation(queries: BlockQueries, first: int, count: int) -> Tensor:
    """Return the mean of the rotations by `count` positions from the first on, a matrix [D, D] for rows x: x @ R."""
    D = queries.rotated.shape[-1]
    units = torch.eye(D, device=queries.pos.device)
    if queries.rope is None:
        return units
    total = torch.zeros_like(units)
    positions = torch.arange(first, first + count, device=units.device)
    for part in torch.split(positions, max(MAX_NUMBERS // D**2, 1)):
        rows = units.expand(len(part), D, D).flatten(0, 1)
        total += queries.rope.shift(rows, part.repeat_interleave(D)).view(-1, D, D).sum(0)
    return total / count
