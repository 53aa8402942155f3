"""What a row with a budget leaves when it ends: its slots, and the numbers that tell how its budget goes on.

It is a snapshot that later rows of the same text go on from. They copy its pages, for a row that evicts writes into all
of its pages sooner or later; the windows of sliding layers are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.types import Ints


def used_pages(pages: Ints, counts: Ints) -> Ints:
    """List the first `counts` [M, G] pages of tables [M, G, n], head after head."""
    found: Ints = pages[np.arange(pages.shape[-1]) < counts[..., None]]
    return found


@dataclass(frozen=True, eq=False)
class DemoterState:
    """The demoted tokens of a group: tables [M, G, n], and what a Demoter knows of each head, int64 [M, G]."""

    pages: Ints
    counts: Ints
    capacities: Tensor
    head_budgets: Tensor
    num_left: Tensor
    scores: Tensor | None  # float32 [M, G, S]


@dataclass(frozen=True, eq=False)
class EvictorState:
    """The unwindowed layers [M] of a KV cache group, and what its BudgetEvictor knows.

    Where `is_dense` nothing was evicted yet: position i is at place i of every head.
    """

    pages: Ints  # [M, G, n]
    counts: Ints  # [M, G]
    num_tokens: Ints  # [M, G]: tokens in the slots
    head_budgets: Ints  # [M, G]
    is_dense: bool
    next_eviction: int  # computed tokens at that moment, if the same answer goes on
    hole_places: Tensor  # int64 [M, G, n]: the holes of its tokens until then, in this order, by place in the tables
    scores: tuple[Tensor, Tensor]  # see SlotScores
    demoter: DemoterState | None


@dataclass(frozen=True, eq=False)
class EvictedState:
    """The state of a row after `position` tokens: of its policy, its unwindowed layers and its rings.

    `evictors` are those of the groups that have unwindowed layers. `in_prompt`: it was taken at the end of a chunk of a
    streamed prompt, and depends on the text alone.
    """

    position: int
    policy: BudgetPolicy  # resolved, with the budget that the slots hold
    evictors: tuple[EvictorState, ...]
    windows: SlidingWindows | None  # None without sliding layers
    in_prompt: bool = False
    masses: tuple[Tensor, ...] = ()  # see PromptMasses: of pages that are those of the text, and may be shared

    @property
    def min_resume_position(self) -> int:
        """A text goes on from the very position at which the state was taken."""
        return self.position

    @property
    def ladder_reach(self) -> int:
        """Inside a prompt only the ends of chunks can be kept: the last one before a rung stands for it."""
        return self.policy.plan.chunk if self.in_prompt else 0

    @property
    def holds_text(self) -> bool:
        """A text goes on from it without its other pages."""
        return False

    @cached_property
    def own_pages(self) -> Ints:
        """The pages of unwindowed layers, demoted tokens included, each named once."""
        slots = [used_pages(e.pages, e.counts) for e in self.evictors]
        demoted = [used_pages(e.demoter.pages, e.demoter.counts) for e in self.evictors if e.demoter]
        return np.concatenate([np.zeros(0, np.int32), *slots, *demoted])

    @cached_property
    def page_list(self) -> Ints:
        """All pages, each named once."""
        return np.concatenate([self.own_pages, *([self.windows.page_list] if self.windows else [])])

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return len(self.page_list)
