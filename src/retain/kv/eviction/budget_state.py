"""What a row with a budget has kept, and the numbers that tell how its budget goes on: records that evictors fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.types import Ints


def used_pages(pages: Ints, counts: Ints) -> Ints:
    """List the first `counts` [M, G] pages of tables [M, G, n], head after head."""
    found: Ints = pages[np.arange(pages.shape[-1]) < counts[..., None]]
    return found


@dataclass(frozen=True, eq=False)
class DemoterState:
    """The demoted tokens of a group: tables [M, G, n], and what a Demoter knows of each head of all ranks, int64."""

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
    num_tokens: Ints  # [M, heads of all ranks]: tokens in the slots
    head_budgets: Ints  # of as many
    is_dense: bool
    next_eviction: int  # computed tokens at that moment, if the same answer goes on
    hole_places: Tensor  # int64 [M, G, n]: the holes of its tokens until then, in this order, by place in the tables
    scores: tuple[Tensor, Tensor]  # see SlotScores
    demoter: DemoterState | None


@dataclass(frozen=True)
class Resumption:
    """How a row goes on after `position` tokens under a resolved policy, and evicts at `first_eviction` tokens.

    `slots` [M, heads of all ranks] of each evictor are those that its heads need until then, and when they have
    evicted. A row that resumes is like one with a streamed prompt in its middle: its tokens so far are a selection, at
    any places, and the next ones fill the holes of each head.
    """

    policy: BudgetPolicy
    previous: BudgetPolicy  # under which the tokens so far were kept
    position: int
    first_eviction: int
    slots: tuple[Ints, ...]
