"""gate_replay: keep the tokens that a gate expects the answer to need, by the prompt's own queries from behind it.

It is `gate`, but for the mass: all queries of a block are moved to the position behind it, as in `replay`, and the
squares of their weights are summed. The gate is fitted to keys and values alone, and the logarithm of that mass is
added. So the prompt is computed once, and begins anew for every request that does not share whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.eviction.plan import REFITS, RowModes
from retain.kv.eviction.policies import gate
from retain.kv.eviction.policy import GateLoader, QueryWeights
from retain.kv.eviction.query_scored import NumQueries, divide_into_blocks, sum_squared_weights
from retain.kv.eviction.view import CacheView
from retain.options import OPTION_GROUP


@dataclass(frozen=True, kw_only=True)
class Policy(gate.Policy):
    """Rank by the score of a gate, of the prompt's queries behind it."""

    block: NumQueries = 1024  # tokens of the prompt whose queries are moved together; texts share whole blocks
    modes: RowModes = field(default=REFITS, metadata=OPTION_GROUP)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.modes.check_starts_anew("scores are of a whole prompt: they do not")

    @property
    def score_key(self) -> tuple[object, ...]:
        """All gates have the same masses, of the same blocks."""
        return type(self), self.block

    def fit(self, max_model_len: int, load_gate: GateLoader) -> Self:
        """Load the gate, too. Raises ValueError where there is none for this policy and model."""
        fitted = super().fit(max_model_len, load_gate)
        if (weights := load_gate(self.file).replayed) is None:
            raise ValueError("gate_replay: the gate of this model is for `gate` alone: `retain fit` found that better")
        return replace(fitted, weights=weights)

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh the queries of the answer."""
        return QueryWeights((pos >= self.prompt_len).astype(np.float32))

    @property
    def query_blocks(self) -> Sequence[range]:
        """All positions of the prompt."""
        return divide_into_blocks(self.prompt_len, self.block)

    def score_queries(self, view: CacheView) -> Tensor:
        """Return the squared weights of all queries of the block behind it."""
        return sum_squared_weights(view, *view.queries_behind)

    def priority(self, view: CacheView) -> Tensor:
        """Return the score of each slot, its mass divided by the number of queries that saw it."""
        # The gate divides by the age. But a slot of the prompt was seen by all queries of its block, not by later ones.
        end = view.query_position + 1.0
        num_queries = end - view.pos.div(self.block, rounding_mode="floor") * self.block
        in_prompt = (view.pos >= 0) & (view.pos < self.prompt_len)
        factor = ((end - view.pos) / num_queries).where(in_prompt, 1)
        return super().priority(replace(view, mass=view.mass * factor[:, :, None]))
