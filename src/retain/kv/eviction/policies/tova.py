"""tova: keep the tokens that the newest query attends to: token omission via attention (arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.policy import QueryWeights


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by the attention of the newest query alone."""

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh only the last query, and drop earlier mass."""
        weights = np.zeros(len(pos), np.float32)
        weights[-1] = 1
        return QueryWeights(weights, decay=0.0)
