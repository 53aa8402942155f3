"""Masses of a text's first tokens, from which a policy that ranks by attention goes on without their queries.

They are taken where the prompt of a row is computed. Another row of the same text gets its keys and values from the
prefix cache, and these masses: it computes only what follows, and the last token of its prompt once more, for logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints


@dataclass(frozen=True, eq=False)
class PromptMasses:
    """The masses that the queries of the first `position` tokens of a text gave to its slots. It is a snapshot.

    It holds the pages of the text, too: masses without these are of no use, and go with them.
    """

    position: int
    policy: BudgetPolicy  # resolved
    masses: tuple[Tensor, ...]  # float32 [M, G, n, C, S] of each KV cache group: n pages of the text
    page_list: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def min_resume_position(self) -> int:
        """Masses are those of one position."""
        return self.position

    @property
    def ladder_reach(self) -> int:
        """Masses stand for no rung."""
        return 0

    @property
    def holds_text(self) -> bool:
        """Masses without the pages of their text are of no use."""
        return True

    @property
    def num_pages(self) -> int:
        """The number of pages."""
        return len(self.page_list)


def read_masses(groups: Sequence[BlockTables], row: int, position: int) -> tuple[Tensor, ...]:
    """Copy the masses of the first tokens of a row that has evicted nothing; see PromptMasses."""
    return tuple(t.kv.mass[_page_index(t, row, position)].clone() for t in groups)


def write_masses(groups: Sequence[BlockTables], row: int, position: int, masses: Sequence[Tensor]) -> None:
    """Give the first tokens of a row, which has pages of its own for them, these masses."""
    for t, values in zip(groups, masses, strict=True):
        t.kv.mass[_page_index(t, row, position)] = values


def _page_index(t: BlockTables, row: int, position: int) -> Tensor:
    """Return the pages of the first tokens in the unwindowed layers, int64 [M, G, n]."""
    return t.kv.to_index(t.pages[row, t.full_layers(row), :, : -(-position // t.page_size)])
