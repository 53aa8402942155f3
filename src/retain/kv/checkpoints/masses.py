"""Masses of a text's first tokens, from which a policy that ranks by attention goes on without their queries.

They are taken where the prompt of a row is computed. Another row of the same text gets its keys and values from the
prefix cache, and these masses: it computes only what follows, and the last token of its prompt once more, for logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import (
    ANYWHERE,
    NOWHERE,
    CheckpointedRow,
    Demand,
    Key,
    Moment,
    Reach,
    SpanContent,
)
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.checkpoint_spans import PageRun
from retain.kv.stores.span import Span
from retain.kv.text import hash_key
from retain.types import Ints

NO_PAGES: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Masses:
    """The masses that the queries of the first `position` tokens of a text gave to its slots, under a policy.

    A row may begin before these tokens end: it gets them when it has computed the others, too.
    """

    position: int
    policy: BudgetPolicy  # resolved
    masses: tuple[Tensor, ...]  # float32 [M, G, n, C, S] of each KV cache group: n pages of the text
    kind = "masses"
    page_list = NO_PAGES
    needs_pages = True
    ladder_reach = 0

    @property
    def resumes_from(self) -> int:
        """Masses are those of one position."""
        return self.position

    def runs(self) -> Sequence[PageRun]:
        """Return (): they are beside the pages of the text."""
        return ()


class CheckpointKind:
    """Copy the attention that a prompt's tokens received, and give it to later rows of the text that score alike."""

    needs_pages = True

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner):
        self.groups = groups

    def keys(self, demand: Demand) -> Sequence[Key]:
        """Return the key of the attention masses of a text: what they depend on beside the text."""
        policy = demand.policy
        if not policy.score_key or policy.plan.is_streamed:
            return ()
        name = f"masses {policy.score_key!r} {demand.seed if policy.uses_noise else 0}"
        names = (name, f"{name} of blocks") if policy.query_blocks else (name,)
        return [Key(hash_key(name.encode())) for name in names]

    def reach(self, demand: Demand, checkpoint: Masses | None) -> Reach:
        """Return the tokens whose queries are not needed; at least one of the prompt is computed, for logits."""
        policy = demand.policy
        if checkpoint is None:
            skippable = policy.max_skippable_tokens
            return ANYWHERE if skippable is None else Reach(0, skippable)
        assert isinstance(policy, BudgetPolicy)
        position = checkpoint.position
        if position > policy.prompt_len or not policy.weighs_alike(checkpoint.policy, position):
            return NOWHERE
        return Reach(0, min(position, policy.prompt_len - 1))

    def capture(self, row: CheckpointedRow, moment: Moment) -> Mapping[bytes, Masses]:
        """Copy the masses of a prompt that is just computed, where they depend on the text alone.

        Where queries are scored by blocks, a longer text has the masses of whole ones: those are left, too.
        """
        policy = row.demand.policy
        keys = self.keys(row.demand) if row.evictors and moment.is_running else ()
        if not keys or policy.scoring_chunk or not row.depends_on_text_alone or row.evictors[0].has_holes:
            return {}
        assert isinstance(policy, BudgetPolicy)
        ends = policy.prompt_len, policy.last_block_start
        now = moment.num_computed
        return {
            key.name: Masses(end, policy, read_masses(self.groups, row.index, end))
            for key, end in zip(keys, ends, strict=False)
            if end == now
        }

    def num_own_pages(self, row: CheckpointedRow, position: int, checkpoint: Masses) -> int:
        """Return 0: masses are beside the pages."""
        return 0

    def due_at(self, position: int, checkpoint: Masses) -> int:
        """Return where the masses were taken: what the queries up to there add is overwritten."""
        return checkpoint.position

    def attach(self, row: CheckpointedRow, position: int, checkpoint: Masses) -> None:
        """Write the attention masses of a checkpoint into the slots of a row that goes on from it."""
        write_masses(self.groups, row.index, checkpoint.position, checkpoint.masses)

    def to_span(self, checkpoint: Masses, position: int) -> SpanContent | None:
        """Return None: stores do not save attention masses."""
        return None

    def from_span(self, demand: Demand, position: int, span: Span, metadata: bytes) -> Masses:
        """Raise ValueError: stores keep no masses of texts."""
        raise ValueError("masses are in no store")

    def with_pages(self, checkpoint: Masses, pages: Ints) -> Masses:
        """Return the masses, which have no pages."""
        return checkpoint


def read_masses(groups: Sequence[BlockTables], row: int, position: int) -> tuple[Tensor, ...]:
    """Copy the masses of the first tokens of a row that has evicted nothing; see Masses."""
    return tuple(t.kv.mass[_page_index(t, row, position)].clone() for t in groups)


def write_masses(groups: Sequence[BlockTables], row: int, position: int, masses: Sequence[Tensor]) -> None:
    """Give the first tokens of a row, which has pages of its own for them, these masses."""
    for t, values in zip(groups, masses, strict=True):
        t.kv.mass[_page_index(t, row, position)] = values


def _page_index(t: BlockTables, row: int, position: int) -> Tensor:
    """Return the pages of the first tokens in the unwindowed layers, int64 [M, G, n]."""
    return t.kv.to_index(t.pages[row, t.full_layers(row), :, : -(-position // t.page_size)])
