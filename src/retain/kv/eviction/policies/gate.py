"""gate: keep the tokens that a fitted linear function expects the answer to need.

The function sees a token's key and value, their norms, its position and the attention that it received, in each layer
and kv head. `retain fit` fits it to what re-reading, answers and their gradients need, so one prefill is enough.
Its scores are comparable across heads and layers, which divide one budget. After KVzip's targets (arXiv 2505.23416).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.gate_weights import GateWeights
from retain.kv.eviction.policy import GateLoader, QueryWeights
from retain.kv.eviction.view import CacheView
from retain.options import RESOLVED
from retain.plugins import Amount

NEWEST = Amount(fraction=0.15)


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Rank by the score of a gate."""

    recent: Amount = NEWEST
    share: str = "all"
    file: str = ""  # of the gate; by default beside the model, or in this package
    weights: GateWeights | None = field(default=None, repr=False, metadata=RESOLVED)  # once it is fitted

    @property
    def scores_slots(self) -> bool:
        """The part of the score that K and V give never changes."""
        return True

    @property
    def score_key(self) -> tuple[object, ...]:
        """All gates have the same masses."""
        return (type(self),)

    @property
    def weights_fingerprint(self) -> bytes:
        """Identify the numbers of the gate, and the shares of heads; empty without them."""
        return super().weights_fingerprint + (self.weights.fingerprint if self.weights else b"")

    @property
    def gate_file(self) -> str:
        """The file that the spec names."""
        return self.file

    def fit(self, max_model_len: int, load_gate: GateLoader) -> Self:
        """Load the gate, too. Raises ValueError where there is none for this model."""
        if (weights := load_gate(self.file).attention) is None:
            raise ValueError("gate: the file of this model has shares of heads alone: `retain fit` adds a gate")
        return replace(super().fit(max_model_len, load_gate), weights=weights)

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Let every query of the prompt count alike."""
        return QueryWeights(np.ones(len(pos), np.float32))

    def score_slots(self, slots: CacheView) -> Tensor:
        """Return the part of the score that never changes."""
        assert self.weights
        return self.weights.fixed_part(slots.unrotated_keys, slots.values, slots.pos, slots.layers)

    def priority(self, view: CacheView) -> Tensor:
        """Return the score that the gate computes for each slot."""
        assert self.weights and view.slot_scores is not None
        return self.weights.score(view.slot_scores, view.mass.sum(2), view.pos, view.query_position)
