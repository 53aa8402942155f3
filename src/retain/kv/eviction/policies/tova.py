"""tova: keep what the newest query looks at (arXiv 2401.06104): token omission via attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy, QueryWeights


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """The attention of the newest query alone."""

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Only the last query counts, and what was before is forgotten."""
        weights = np.zeros(len(pos), np.float32)
        weights[-1] = 1
        return QueryWeights(weights, decay=0.0)
