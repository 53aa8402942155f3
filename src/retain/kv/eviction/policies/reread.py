"""reread: keep the tokens that the model attends to when it reads the prompt again, as if it were to repeat it.

One more prefill: the prompt's tokens follow the prompt, `rereads` at a time, add mass to its slots, and are dropped.
After KVzip (arXiv 2505.23416), which takes the largest weight, not the sum. `mix=h2o` adds attention of the prompt,
`ask=repeat` reads each message behind a request to repeat it, `first=24` waits for what the answer's first tokens need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.plan import STARTS_ANEW, RowModes
from retain.kv.eviction.policy import QueryWeights, ScoringPass
from retain.kv.eviction.prompt_parts import SHORTEST_TEXT, divide_prompt
from retain.kv.eviction.view import CacheView
from retain.options import OPTION_GROUP, NonNegativeInt, PositiveInt
from retain.plugins import check_choice


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by the attention of the prompt read again."""

    REPEAT = "Repeat the previous context exactly."
    mix: str = "none"  # or h2o
    rereads: PositiveInt = 1024  # tokens at a time; a head needs as many more slots for a moment
    ask: str = "none"  # or repeat: in the model's own chat form
    first: NonNegativeInt = 0  # tokens of the answer before anything is evicted; what they attend to counts, too
    modes: RowModes = field(default=STARTS_ANEW, metadata=OPTION_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mix", self.mix, "none", "h2o")
        check_choice("ask", self.ask, "none", "repeat")
        self.modes.check_starts_anew("reread reads the whole prompt again: it does not")
        if self.first and (self.heads, self.scope) != ("kv-sum", "layer"):
            raise ValueError("first goes with heads=kv-sum and scope=layer")

    @property
    def instruction(self) -> str:
        """The message that asks to repeat the prompt; "" where it is read again without."""
        return self.REPEAT if self.ask == "repeat" else ""

    @property
    def scoring_chunk(self) -> int:
        """Tokens of a second reading that are in the cache at a time."""
        return self.rereads

    @property
    def scoring_room(self) -> int:
        """Tokens of context behind the prompt. With less, few tokens to repeat would follow each instruction."""
        least = SHORTEST_TEXT + 2 * len(self.instruction_ids)
        return min(self.plan.scoring_tokens, least) if self.prompt_len > self.budget_tokens else 0

    def scoring_passes(self, prompt: Sequence[int], max_chunk: int) -> list[ScoringPass]:
        """Read the prompt once more, unless the budget holds all of it."""
        chunk = min(self.rereads, max_chunk)
        size = chunk - len(self.instruction_ids)  # of a part of the prompt
        if size < 1 or len(prompt) <= self.budget_tokens:
            return []
        if not self.instruction_ids:
            return [ScoringPass(prompt, chunk)]
        parts = divide_prompt(prompt, self.special_ids, len(self.instruction_ids), size)
        return [ScoringPass((*self.instruction_ids, *part), chunk) for part in parts]

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh queries behind the prompt: those that read it again, and the answer's."""
        return QueryWeights(((pos >= self.prompt_len) | (self.mix == "h2o")).astype(np.float32))

    @property
    def eviction_delay(self) -> int:
        """Tokens of the answer before the budget begins: their attention counts."""
        return self.first if self.prompt_len > self.budget_tokens else 0

    @property
    def compares_heads(self) -> bool:
        """With `first` a share is that of all heads."""
        return super().compares_heads or self.first > 0

    @property
    def scores_slots(self) -> bool:
        """With `first` slots keep the mass of the second reading, apart from the answer's."""
        return self.first > 0

    def score_slots(self, slots: CacheView) -> Tensor:
        """Return the mass before the answer; 0 for the answer's own slots."""
        return self.reduce_heads(slots).masked_fill(slots.pos >= self.prompt_len, 0)

    def scored_priority(self, view: CacheView, mass: Tensor, scores: Tensor) -> Tensor:
        """With `first`, return the larger share of the second reading's mass and of the answer's."""
        prompt = (view.pos >= 0) & (view.pos < self.prompt_len)
        each = scores, (mass - scores).relu()
        return torch.maximum(*(x / self.kv_heads.gather(x.where(prompt, 0)).sum(-1).sum().clamp(1e-30) for x in each))
