"""window: keep the newest tokens. The tokens of `ring`, found by priority instead of in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Keep the newest tokens."""

    @property
    def ranked_by(self) -> str | None:
        """See BudgetPolicy.ranked_by."""
        return "position" if type(self).priority is Policy.priority else None

    def priority(self, view: CacheView) -> Tensor:
        """Rank by position."""
        return view.pos
