"""reread: keep what the model looks at when it reads the prompt again, as if it were to repeat it.

One more prefill: the tokens of the prompt follow it, `rereads` at a time, and leave attention on its slots; then they
are forgotten. The score does not depend on a question that the prompt ends with. After KVzip (arXiv 2505.23416), which
takes the largest weight where this takes the sum. `mix=h2o` adds the attention of the prompt's own queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kv.eviction.budget import AttentionScoredPolicy, QueryWeights
from retain.plugins import check_choice


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """The attention of the prompt read again."""

    mix: str = "none"  # or h2o
    rereads: int = 1024  # tokens at a time: so much more room a head takes for a moment

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mix", self.mix, "none", "h2o")
        if self.prefill == "stream" or self.rereads < 1:
            raise ValueError("reread reads the whole prompt again, rereads >= 1 at a time; not with prefill=stream")

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Queries behind the prompt count: those that read again, and the answer's."""
        return QueryWeights(((pos >= self.prompt_len) | (self.mix == "h2o")).astype(np.float32))
