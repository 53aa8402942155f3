"""dilated: keep every `stride`-th token, the newest of them: a window that reaches further back (arXiv 2004.05150).

One of Keyformer's baselines.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.options import PositiveInt


@dataclass(frozen=True, kw_only=True)
class Policy(BudgetPolicy):
    """Keep every `stride`-th token and the newest."""

    stride: PositiveInt = 2

    def priority(self, view: CacheView) -> Tensor:
        """Rank by position; tokens between strides rank below all others."""
        return view.pos - (view.pos % self.stride != 0) * 2**22  # longer than any text
