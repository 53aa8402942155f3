"""The checkpoint of a row with a budget: the slots that it kept, and how its budget goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from retain.kv.checkpoints.windows_and_states import WindowsAndStates
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import EvictorState, used_pages
from retain.kv.stores.checkpoint_spans import PageRun
from retain.types import Ints


@dataclass(frozen=True, eq=False)
class BudgetCheckpoint:
    """What a row had after `position` tokens: its policy, its unwindowed layers and its rings.

    `evictors` are those of the KV cache groups `groups`, which have unwindowed layers. `in_prompt`: it was taken at the
    end of a chunk of a streamed prompt, and depends on the text alone.
    """

    position: int
    policy: BudgetPolicy  # resolved, with the budget that the slots hold
    evictors: tuple[EvictorState, ...]
    groups: tuple[int, ...]
    windows: WindowsAndStates | None  # None without sliding layers
    in_prompt: bool = False
    masses: tuple[Tensor, ...] = ()  # see Masses: of pages that are those of the text, and may be shared
    kind = "budget"
    needs_pages = False  # it has those that stand in for the text's

    @property
    def resumes_from(self) -> int:
        """A text goes on from the very position at which it was taken."""
        return self.position

    @property
    def ladder_reach(self) -> int:
        """Inside a prompt only the ends of chunks can be kept: the last one before a rung stands for it."""
        return self.policy.plan.chunk if self.in_prompt else 0

    @cached_property
    def own_pages(self) -> Ints:
        """The pages of unwindowed layers, demoted tokens included, each named once."""
        return np.concatenate([np.zeros(0, np.int32), *(run.pages for run in self._own_runs())])

    @cached_property
    def page_list(self) -> Ints:
        """All pages, each named once."""
        return np.concatenate([self.own_pages, *([self.windows.page_list] if self.windows else [])])

    def runs(self) -> Sequence[PageRun]:
        """Return the pages of each layer that has some. Something reads them all before the step."""
        rings = self.windows.runs() if self.windows else []
        found = [*self._own_runs(), *(PageRun(run.group, False, run.pages) for run in rings)]
        return [run for run in found if len(run.pages)]

    def _own_runs(self) -> list[PageRun]:
        found = []
        for g, part in zip(self.groups, self.evictors, strict=True):
            pairs = zip(part.pages, part.counts, strict=True)
            found += [PageRun(g, False, used_pages(pages, counts)) for pages, counts in pairs]
            if part.demoter:
                pairs = zip(part.demoter.pages, part.demoter.counts, strict=True)
                found += [PageRun(g, True, used_pages(pages, counts)) for pages, counts in pairs]
        return found
