"""snapkv: keep the tokens that the last queries of the prompt attend to (arXiv 2404.14469), without pooling.

SnapKV evicts once, after the prompt; here the answer's queries count too, for the budget holds to its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.policy import QueryWeights
from retain.options import PositiveInt


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by the attention of the last queries of the prompt."""

    queries: PositiveInt = 32

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh the last `queries` of the prompt and everything behind them."""
        return QueryWeights((pos >= self.prompt_len - self.queries).astype(np.float32))
