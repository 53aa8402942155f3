"""snapkv: keep what the last queries of the prompt look at (arXiv 2404.14469), without its pooling over neighbours.

SnapKV itself forgets once, after the prompt; here the answer's queries count too, for the budget holds to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy, QueryWeights


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """The attention of the last queries of the prompt."""

    queries: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 1:
            raise ValueError(f"snapkv: queries must be at least 1, not {self.queries}")

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Queries from the last ones of the prompt on count."""
        return QueryWeights((pos >= self.prompt_len - self.queries).astype(np.float32))
