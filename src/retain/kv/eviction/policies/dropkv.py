"""dropkv: keep the tokens without which the outputs of the prompt's last queries change the most.

The change is that of leaving the token out of the softmax, squared (DropKV, NVIDIA/kvpress#285). Scores are smoothed
over neighbouring positions, and comparable across heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from retain.kv.eviction.query_scored import NumQueries, QueryScoredPolicy, pool_positions, sum_output_changes
from retain.kv.eviction.view import CacheView
from retain.options import Bounds


@dataclass(frozen=True, kw_only=True)
class Policy(QueryScoredPolicy):
    """Rank by what the outputs of the last queries lose."""

    share: str = "layer"
    queries: NumQueries = 32  # the last of the prompt
    pool: Annotated[int, Bounds(1, 255)] = 7  # neighbouring positions whose mean is the score, an odd number

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool % 2 == 0:
            raise ValueError(f"dropkv: pool must be odd, not {self.pool}")

    @property
    def query_blocks(self) -> Sequence[range]:
        """The last positions of the prompt."""
        n = self.prompt_len
        return [range(max(n - self.queries, 0), n)] if n else []

    def score_queries(self, view: CacheView) -> Tensor:
        """Return the squared changes of outputs, pooled over positions."""
        assert view.queries
        found = sum_output_changes(view, view.queries.rotated, view.queries.pos)
        return pool_positions(found, view.pos[0], view.query_position + 1, self.pool)
