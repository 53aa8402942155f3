"""reread: keep the tokens that the model attends to when it reads the prompt again, as if it were to repeat it.

One more prefill: the prompt's tokens follow the prompt, `rereads` at a time, add mass to its slots, and are dropped.
The score does not depend on a question that the prompt ends with. After KVzip (arXiv 2505.23416), which takes the
largest weight where this takes the sum. `mix=h2o` adds the attention of the prompt's own queries, `ask=repeat` puts a
request to repeat the text before each part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

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
    ask: str = "none"  # or repeat: in the model's own chat form
    asked: tuple[int, ...] = field(default=(), init=False)  # ids of the request

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mix", self.mix, "none", "h2o")
        check_choice("ask", self.ask, "none", "repeat")
        if self.prefill == "stream" or self.rereads < 1:
            raise ValueError("reread reads the whole prompt again, rereads >= 1 at a time; not with prefill=stream")

    @property
    def instruction(self) -> str:
        """See EvictionPolicy."""
        return "Repeat the previous context exactly." if self.ask == "repeat" else ""

    def with_instruction(self, token_ids: Sequence[int]) -> Self:
        """See EvictionPolicy."""
        found = self.with_options()
        object.__setattr__(found, "asked", tuple(token_ids))
        return found

    @property
    def scoring_chunk(self) -> int:
        """Tokens of the second reading that are in the cache at a time."""
        return self.rereads

    def scoring_passes(self, prompt: Sequence[int], max_chunk: int) -> list[ScoringPass]:
        """Read the prompt once more, unless the budget holds all of it."""
        chunk = min(self.rereads, max_chunk)
        size = chunk - len(self.asked)  # of a part of the prompt
        if size < 1 or len(prompt) <= self.budget_tokens:
            return []
        if not self.asked:
            return [ScoringPass(prompt, chunk)]
        return [ScoringPass((*self.asked, *prompt[i : i + size]), chunk) for i in range(0, len(prompt), size)]

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh queries behind the prompt: those that read it again, and the answer's."""
        return QueryWeights(((pos >= self.prompt_len) | (self.mix == "h2o")).astype(np.float32))
