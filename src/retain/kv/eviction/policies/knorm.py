"""knorm: keep the keys with the smallest norm: they attract the most attention (arXiv 2406.11430).

Needs no mass.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Keep small keys."""

    def priority(self, view: CacheView) -> Tensor:
        """Return minus the norm of the key."""
        return -view.keys.norm(dim=-1)
