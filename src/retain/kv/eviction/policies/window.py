"""window: keep the newest tokens. What ring does in closed form, by looking: the papers' baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """The newest tokens."""

    def priority(self, view: CacheView) -> Tensor:
        """The position."""
        return view.pos
