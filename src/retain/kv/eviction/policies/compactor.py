"""compactor: keep keys that are unlike the others, and those that their neighbours attend to (arXiv 2507.08143).

The score is blend * z(leverage) + z(attention). The leverage of a key before rotation is how much of the span of all
keys it is alone in, from a random sketch of their numbers. Attention is that of the queries of a chunk to its keys, not
causal and without the scale, times the norm of the value, and smoothed. z is taken over the prompt in all heads of a
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from retain.kv.eviction.query_scored import MAX_WEIGHTS, NumQueries, QueryScoredPolicy, pool_positions, sum_by_row
from retain.kv.eviction.view import CacheView
from retain.options import Bounds, NonNegativeInt

RIDGE = 0.01
POOLED = 3  # neighbouring positions
SMALLEST_DEVIATION = 1e-6


@dataclass(frozen=True, kw_only=True)
class Policy(QueryScoredPolicy):
    """Rank by leverage and by attention inside chunks. What is evicted is also how much leverage counts."""

    sinks: NonNegativeInt = 8  # which take no part
    block: NumQueries = 256  # tokens of a chunk
    sketch: Annotated[int, Bounds(1, 256)] = 48  # numbers of a key's sketch
    compares_heads = True  # scores are standardized over all heads of a layer

    @property
    def score_key(self) -> tuple[object, ...]:
        """The sinks, too, which take no part, and the budget, by which leverage counts."""
        return *super().score_key, self.sinks, self.budget

    @property
    def query_blocks(self) -> Sequence[range]:
        """Chunks of the prompt behind the sinks."""
        n = self.prompt_len
        return [range(begin, min(begin + self.block, n)) for begin in range(min(self.sinks, n - 1), n, self.block)]

    def score_queries(self, view: CacheView) -> Tensor:
        """Return what the queries of a chunk attend to; of the last one, what makes the mass the whole score."""
        found = self._attention_in_chunk(view)
        if view.query_position + 1 < self.prompt_len:
            return found
        num_heads = found.shape[1]
        before = view.mass[0].sum(1)  # [G, S]
        return ((self._blend(view, before + found.sum(1)) - before) / num_heads)[:, None].expand_as(found)

    def _attention_in_chunk(self, view: CacheView) -> Tensor:
        """Return the attention to each slot of the chunk, [G, R, S], whose sum is the mean over query heads."""
        assert view.queries
        q = view.queries.rotated
        G, R, n, D = q.shape
        is_in_chunk = view.pos[0] >= view.queries.pos[0]
        places = is_in_chunk.byte().argsort(dim=-1, descending=True, stable=True)[:, :n]  # all heads have all n
        columns = view.keys[0].gather(1, places[..., None].expand(G, n, D))[:, None].transpose(-1, -2)
        parts = torch.split(q, max(MAX_WEIGHTS // (view.queries.num_heads * n), 1), dim=2)
        received = torch.stack([(part @ columns).softmax(-1).sum(2) for part in parts]).sum(0)  # [G, R, n]
        found = received.new_zeros(G, R, view.pos.shape[-1])
        found.scatter_(-1, places[:, None].expand_as(received), received)
        return found * view.values[0].norm(dim=-1)[:, None] / R

    def _blend(self, view: CacheView, attention: Tensor) -> Tensor:
        """Return the scores of all slots [G, S], none below 0; those of sinks and holes are 0."""
        part = view.pos[0] >= min(self.sinks, self.prompt_len - 1)
        smooth = pool_positions(attention.where(part, 0)[:, None], view.pos[0], self.prompt_len, POOLED)[:, 0]
        alone, smooth, takes_part = (self.kv_heads.gather(x, 0) for x in (self._leverage(view, part), smooth, part))
        share = max(1 - self.budget_tokens / self.prompt_len, 0)
        score = share * standardize(alone, takes_part) + standardize(smooth, takes_part)
        score -= score.where(takes_part, torch.inf).amin()
        return self.kv_heads.select(score.where(takes_part, 0), 0)

    def _leverage(self, view: CacheView, takes_part: Tensor) -> Tensor:
        """Return the leverage of each key among those that take part, [G, S]."""
        k = view.unrotated_keys[0].where(takes_part[..., None], 0)  # [G, S, D]
        k = k - k.sum(1, keepdim=True) / takes_part.sum(1)[:, None, None]
        sizes = self.kv_heads.num_of_all(len(k)), k.shape[-1], self.sketch
        sketch = self.kv_heads.select(torch.randn(*sizes, generator=torch.Generator().manual_seed(0)), 0)
        return leverage(k, sketch.to(k.device) / self.sketch**0.5, takes_part)


def leverage(k: Tensor, sketch: Tensor, takes_part: Tensor) -> Tensor:
    """Return the leverage of keys [G, S, D] among those that take part, [G, S], from sketches k @ sketch [G, D, n]."""
    x = (k @ sketch).where(takes_part[..., None], 0)
    gram = x.transpose(1, 2) @ x + RIDGE * torch.eye(x.shape[-1], device=k.device)
    return (x * torch.linalg.solve(gram, x.transpose(1, 2)).transpose(1, 2)).sum(-1).clamp(min=0)


def standardize(x: Tensor, takes_part: Tensor) -> Tensor:
    """Return numbers with the mean 0 and the deviation 1 over all of a layer that take part; one alone gets 0."""
    x = x - sum_by_row(x.where(takes_part, 0)).sum() / takes_part.sum()
    variance = sum_by_row(x.square().where(takes_part, 0)).sum() / (takes_part.sum() - 1).clamp(min=1)
    return x / variance.sqrt().clamp(min=SMALLEST_DEVIATION)
