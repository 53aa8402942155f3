"""What a draft head's layer keeps in a row with a budget: its newest tokens, when and as many as the other layers.

No query of the head is there while the target computes, so nothing else could rank them. It changes no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

from torch import Tensor

from retain.kernels.ranks import ALL_HEADS
from retain.kv.eviction.budget import BudgetPolicy, PositionPolicy
from retain.kv.eviction.plan import RowPlan
from retain.kv.eviction.view import CacheView
from retain.options import RESOLVED


@dataclass(frozen=True, kw_only=True)
class DraftHeadPolicy(PositionPolicy):
    """Evict by position, as the plan of another policy says; resolved."""

    followed: BudgetPolicy = field(repr=False, metadata=RESOLVED)

    @classmethod
    def of(cls, policy: BudgetPolicy) -> Self:
        """Return the policy of a head's layer in a row under this resolved policy."""
        same = {f.name: getattr(policy, f.name) for f in fields(BudgetPolicy)}
        modes = replace(policy.modes, refit=0)  # which queries fit
        own = {"share": "none", "head_shares": None, "modes": modes, "kv_heads": ALL_HEADS}
        return cls(**same | own, followed=policy)

    @cached_property
    def plan(self) -> RowPlan:
        """The plan of the other policy, without the queries that fit values."""
        return replace(self.followed.plan, refit=0)

    def head_budgets(self, view: CacheView, budget: int) -> Tensor:
        """Return the tokens that each head keeps: a resumed row may have fewer than other layers, and no first one."""
        return super().head_budgets(view, budget).minimum((view.pos >= 0).sum(-1).cpu())

    def halved(self) -> Self | None:
        """Return what follows the other policy with half its budget, where that allows it."""
        smaller = self.followed.halved()
        return None if smaller is None else type(self).of(smaller)
