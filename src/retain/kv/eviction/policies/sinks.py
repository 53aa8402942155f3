"""sinks: keep the first tokens, which every head leans on, and the newest (StreamingLLM, arXiv 2309.17453).

Positions stay those of the text: a text longer than the model's context is not for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Attention sinks and the newest tokens."""

    sinks: int = 4

    def priority(self, view: CacheView) -> Tensor:
        """The position; the sinks are protected."""
        return view.pos
