"""h2o: keep the heavy hitters, the tokens that received the most attention (arXiv 2306.14048).

The score is the sum of attention weights over all queries of prompt and answer, per layer and kv head. `damping` below
1 lets old attention fade, which Keyformer reports not to help (arXiv 2403.09054, figure 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.policy import QueryWeights
from retain.options import Fraction


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by accumulated attention."""

    damping: Fraction = 1.0  # for each query

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh every query, later ones more where damping is below 1."""
        n = len(pos)
        return QueryWeights((self.damping ** np.arange(n - 1, -1, -1)).astype(np.float32), decay=self.damping**n)
