"""sinks: keep the first tokens, to which every head attends, and the newest (StreamingLLM, arXiv 2309.17453).

Positions stay those of the text: no text is longer than the model's context.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.options import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Keep attention sinks and the newest tokens."""

    sinks: NonNegativeInt = 4

    @property
    def ranked_by(self) -> str | None:
        """See BudgetPolicy.ranked_by."""
        return "position" if type(self).priority is Policy.priority else None

    def priority(self, view: CacheView) -> Tensor:
        """Rank by position; sinks are protected."""
        return view.pos
