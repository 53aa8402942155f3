"""Policies that score the slots of a prompt by its queries, which they see block by block.

What a block gives is added to the masses of slots, before anything is evicted. Later queries of the answer add their
attention, as in every policy that ranks by attention. The two are compared by their shares of what all slots of the
prompt have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.plan import STARTS_ANEW, RowModes
from retain.kv.eviction.policy import QueryWeights
from retain.kv.eviction.view import CacheView
from retain.options import OPTION_GROUP, Bounds
from retain.plugins import Amount

NEWEST = Amount(fraction=0.15)
MAX_WEIGHT = 0.999  # of a slot that is nearly all that a query sees
MAX_WEIGHTS = 2**20  # numbers of attention weights that are computed at a time: a cache has room for them
MIN_QUERIES = 16  # that are computed at a time, however many slots they see: fewer would read these slots too often
SMALLEST_SUM = 1e-30
NumQueries = Annotated[int, Bounds(1, 4096)]  # of tokens that are held together, in float32 and for all layers


@dataclass(frozen=True, kw_only=True)
class QueryScoredPolicy(AttentionScoredPolicy):
    """Options of policies that have `query_blocks` and `score_queries`. Raises ValueError."""

    recent: Amount = NEWEST
    modes: RowModes = field(default=STARTS_ANEW, metadata=OPTION_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.modes.check_starts_anew("scores are of a whole prompt: they do not")
        if self.heads in ("query", "union") or self.scope == "shared":  # ranks and sums of layers have no shares
            raise ValueError("scores are of a kv head: they go with heads=kv-sum or kv-max, and scope=layer")

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh the queries of the answer."""
        return QueryWeights((pos >= self.prompt_len).astype(np.float32))

    @property
    def scores_slots(self) -> bool:
        """Slots keep what the prompt gave them, apart from the answer's attention."""
        return True

    def score_slots(self, slots: CacheView) -> Tensor:
        """Return the mass before the answer; 0 for the answer's own slots."""
        return self.reduce_heads(slots).masked_fill(slots.pos >= self.prompt_len, 0)

    def scored_priority(self, view: CacheView, mass: Tensor, scores: Tensor) -> Tensor:
        """Return the larger share of what the prompt gave and of the answer's attention."""
        in_prompt = (view.pos >= 0) & (view.pos < self.prompt_len)
        answer = (mass - scores).clamp(min=0)
        return torch.maximum(*(self._shares(x, in_prompt) for x in (scores, answer)))

    def _shares(self, x: Tensor, in_prompt: Tensor) -> Tensor:
        """Divide numbers of slots [M, G, S] by the sum over the prompt's, of all heads that share a budget."""
        dims = {"layer": (1, 2), "all": (0, 1, 2)}.get(self.share, (2,))
        prompt = x.where(in_prompt, 0)
        prompt = self.kv_heads.gather(prompt) if 1 in dims else prompt
        return x / sum_by_row(prompt).sum(dims, keepdim=True).clamp(min=SMALLEST_SUM)


def sum_by_row(x: Tensor) -> Tensor:
    """Sum the last dimension [..., 1]. Sums of few rows are then the same on any number of threads."""
    return x.sum(-1, keepdim=True)


def divide_into_blocks(num_tokens: int, size: int) -> list[range]:
    """Return the positions of a prompt in blocks of `size`; the last one may be smaller."""
    return [range(begin, min(begin + size, num_tokens)) for begin in range(0, num_tokens, size)]


def sum_output_changes(view: CacheView, q: Tensor, pos: Tensor) -> Tensor:
    """Return by how much the outputs of queries change without each slot, squared and summed, float32 [G, R, S].

    Without a slot of weight p and value v an output o moves by p / (1 - p) (v - o). q [G, R, n, D], pos as in
    `attention_weights`.
    """
    v = view.values[0][:, None]  # [G, 1, S, V]
    energy = v.square().sum(-1)
    found = torch.zeros(())
    for weights in iter_weights(view, q, pos):  # in place from here on: memory is what this takes
        o = weights @ v
        weights.clamp_(max=MAX_WEIGHT)
        weights.div_(1 - weights).square_()
        # |v - o|^2 = |v|^2 - 2 v o + |o|^2, each part summed over queries by one product of matrices.
        parts = torch.cat((o, torch.ones_like(o[..., :1]), o.square().sum(-1, keepdim=True)), -1)
        sums = weights.transpose(-1, -2) @ parts  # [G, R, S, V + 2]
        change = sums[..., -2] * energy - 2 * (sums[..., :-2] * v).sum(-1) + sums[..., -1]
        found = found + change.clamp_(min=0)
    return found


def sum_squared_weights(view: CacheView, q: Tensor, pos: Tensor) -> Tensor:
    """Return the squared weights of queries [G, R, n, D], summed, float32 [G, R, S]; pos as in `attention_weights`."""
    return sum((weights.square_().sum(2) for weights in iter_weights(view, q, pos)), torch.zeros(()))


def iter_weights(view: CacheView, q: Tensor, pos: Tensor) -> Iterator[Tensor]:
    """Yield the weights [G, R, m, S] of some queries [G, R, n, D] at a time; pos as in `attention_weights`."""
    assert view.queries
    num_queries = max(MAX_WEIGHTS // (view.queries.num_heads * view.pos.shape[-1]), MIN_QUERIES)
    positions = torch.split(pos, num_queries) if len(pos) > 1 else repeat(pos)
    for part, part_pos in zip(torch.split(q, num_queries, dim=2), positions, strict=False):
        yield view.attention_weights(part, part_pos)


def pool_positions(scores: Tensor, pos: Tensor, num_tokens: int, size: int) -> Tensor:
    """Return the mean scores [G, R, S] of `size` neighbouring positions, zeros beyond the ends; holes get 0.

    Slots [G, S] have the positions 0 to num_tokens - 1, in any order.
    """
    is_used = (pos >= 0)[:, None].expand_as(scores)
    places = pos.clamp(min=0).long()[:, None].expand_as(scores)
    by_position = torch.zeros(*scores.shape[:2], num_tokens, device=scores.device)
    by_position.scatter_add_(-1, places, scores.where(is_used, 0))
    pooled = torch.nn.functional.avg_pool1d(by_position, size, stride=1, padding=size // 2)
    return pooled.gather(-1, places).where(is_used, 0)
