"""Several ranks that compute one model: the first schedules, the others repeat what it does to its cache and compute.

One message a step goes from the first rank to the others: calls of its cache, then the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from retain.engine.runner import Runner
from retain.kernels.api import Batch, GroupInputs
from retain.kernels.ranks import Ranks
from retain.kernels.slots.scoring import AttentionScoring
from retain.kv.journal import Call, Journal, Replica
from retain.kv.manager import KVCacheManager


class RankGroup(Ranks, Protocol):
    """Ranks, and messages from the first to the others."""

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has gone."""

    def check(self) -> None:
        """Raise RankError where another rank has ended."""


class RankError(ChildProcessError):
    """Raised where another rank has ended: nothing more can be computed."""


@dataclass(frozen=True)
class StepTokens:
    """The fresh tokens of a step without what each rank has of its own. See `Batch`."""

    rows: Tensor  # [B]
    query_start_loc: Tensor  # [B + 1]
    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    scoring: AttentionScoring | None
    bfloat16_rows: Sequence[tuple[int, int]]
    adapters: Tensor | None
    looks: Tensor | None

    @classmethod
    def of(cls, batch: Batch) -> StepTokens:
        """Return those of a batch, whose tokens are all known."""
        assert batch.pending_tokens is None and batch.hidden_states is None
        return cls(
            batch.rows,
            batch.query_start_loc,
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.scoring,
            batch.bfloat16_rows,
            batch.adapters,
            next((g.tables.looks for g in batch.groups if g.tables.looks is not None), None),
        )

    def build_batch(self, cache: KVCacheManager) -> Batch:
        """Return the batch of another rank, whose cache has repeated all calls before the step."""
        starts = self.query_start_loc
        first_positions = self.positions[starts[:-1].long()].tolist()
        token_rows = self.rows.repeat_interleave(starts.diff())
        tables = cache.build_tables(self.rows, starts)
        groups = cache.group_inputs(token_rows.numpy(), self.positions.numpy(), tables)
        return Batch(
            groups=[self._with_looks(group) for group in groups],
            caches=cache.spec.group_indices,
            input_ids=self.input_ids,
            positions=self.positions,
            logits_indices=self.logits_indices,
            scoring=self.scoring,
            before_attention=cache.attention_hook(self.rows.tolist(), first_positions, starts.tolist()),
            bfloat16_rows=self.bfloat16_rows,
            adapters=self.adapters,
        )

    def _with_looks(self, group: GroupInputs) -> GroupInputs:
        if self.looks is None or group.kv.sketches is None:
            return group
        return replace(group, tables=replace(group.tables, looks=self.looks))


@dataclass(frozen=True)
class StepMessage:
    """What the other ranks do in a step: repeat calls, forget texts, and compute."""

    calls: Sequence[Call]
    forgotten: Sequence[int]
    tokens: StepTokens


class LeadingRunner:
    """Compute a batch on all ranks, on the first of them."""

    def __init__(self, runner: Runner, ranks: RankGroup, journal: Journal):
        self.runner = runner
        self.ranks = ranks
        self.journal = journal

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch; see `Runner`. Raises RankError where another rank has ended."""
        self.ranks.broadcast(StepMessage(*self.journal.take(), StepTokens.of(batch)))
        try:
            return self.runner.forward(batch)
        except RuntimeError:
            self.ranks.check()
            raise

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states of the last batch."""
        return self.runner.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch."""
        return self.runner.state_size


def lead(runner: Runner, cache: KVCacheManager, ranks: RankGroup) -> LeadingRunner:
    """Return the runner of the first rank, and note from now on what is done to its cache."""
    journal = Journal()
    cache.set_journal(journal)
    return LeadingRunner(runner, ranks, journal)


def follow(runner: Runner, cache: KVCacheManager, ranks: RankGroup) -> None:
    """Do what the first rank says until it ends. Raises RankError where it has gone, and DivergedError."""
    replica = Replica(cache)
    cache.prefix_cache.tree.pins.clock = lambda: replica.time
    while (message := ranks.broadcast()) is not None:
        replica.repeat(message.calls, message.forgotten)
        runner.forward(message.tokens.build_batch(cache))
