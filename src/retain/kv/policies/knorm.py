"""knorm: keep the keys with the smallest norm: they attract the most attention (arXiv 2406.11430).

Nothing is observed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.budget import Budget
from retain.kv.view import View


@dataclass(frozen=True, kw_only=True)
class Policy(Budget):
    """Small keys."""

    def priority(self, view: View) -> Tensor:
        """Minus the norm."""
        return -view.keys.norm(dim=-1)
