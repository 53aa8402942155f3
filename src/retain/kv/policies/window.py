"""window: keep the newest tokens. What ring does in closed form, by looking: the papers' baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retain.kv.budget import Budget
from retain.kv.view import View


@dataclass(frozen=True, kw_only=True)
class Policy(Budget):
    """The newest tokens."""

    def priority(self, view: View) -> Tensor:
        """The position."""
        return view.pos
