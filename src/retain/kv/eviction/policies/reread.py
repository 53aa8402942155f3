"""reread: keep the tokens that the model attends to when it reads the prompt again, as if it were to repeat it.

One more prefill: the prompt's tokens follow the prompt, `rereads` at a time, add mass to its slots, and are dropped.
The score does not depend on a question that the prompt ends with. After KVzip (arXiv 2505.23416), which takes the
largest weight where this takes the sum. `mix=h2o` adds the attention of the prompt's own queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.policy import QueryWeights, ScoringPass
from retain.plugins import check_choice


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by the attention of the prompt read again."""

    mix: str = "none"  # or h2o
    rereads: int = 1024  # tokens at a time; a head needs as many more slots for a moment

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mix", self.mix, "none", "h2o")
        if self.prefill == "stream" or self.rereads < 1:
            raise ValueError("reread reads the whole prompt again, rereads >= 1 at a time; not with prefill=stream")

    @property
    def scoring_chunk(self) -> int:
        """Tokens of the second reading that are in the cache at a time."""
        return self.rereads

    def scoring_passes(self, prompt: Sequence[int], max_chunk: int) -> list[ScoringPass]:
        """Read the prompt once more, unless the budget holds all of it."""
        chunk = min(self.rereads, max_chunk)
        return [ScoringPass(prompt, chunk)] if chunk > 0 and len(prompt) > self.budget_tokens else []

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh queries behind the prompt: those that read it again, and the answer's."""
        return QueryWeights(((pos >= self.prompt_len) | (self.mix == "h2o")).astype(np.float32))
