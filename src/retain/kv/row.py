"""Rows: what the cache has of one running request, from `KVCacheManager.open` to `Row.close`.

A row reserves pages before a step, and commits the step afterwards: rings shrink, and a full budget must evict. It may
begin with a cached prefix or as a fork of another row, and leaves its prefix to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import Demand, Moment, TextCheckpoint
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.kv.memory.grouped_cache import GroupedKVCache
from retain.kv.memory.quantized_copies import QuantizedCopies, QuantizedCopy
from retain.kv.memory.ring_snapshot import RingSnapshot
from retain.kv.prefix.cache import HeldCheckpoint, PrefixCache
from retain.kv.prefix.diagnosis import PrefixDiagnosis, explain_prefix
from retain.kv.prefix.history import SeenText
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.request import LoadStats
from retain.kv.stores.loader import LayerLoader
from retain.types import Ints


@dataclass
class CacheParts:
    """What the rows of a cache share. `rows` are those that are open, by index."""

    planner: CapacityPlanner
    slots: GroupedKVCache
    prefix_cache: PrefixCache
    copies: QuantizedCopies
    key_transform: KeyTransform
    rows: dict[int, Row] = field(default_factory=dict)
    due: dict[Row, int] = field(default_factory=dict)  # rows that must evict, and their computed tokens
    num_evicted_slots: Counter[str] = field(default_factory=Counter)  # of closed rows, by policy


@dataclass(frozen=True)
class AttachedPrefix:
    """What a row begins with: computed tokens, and a position where more texts could branch off (0: nowhere).

    A row that stores its prefix when it reaches `branch_point` lets others begin there. `diagnosis` says why there are
    no more tokens, where it was asked for. `load` is that of a state, which has ended.
    """

    num_tokens: int
    branch_point: int
    diagnosis: PrefixDiagnosis | None = None
    load: LoadStats | None = None


class Row:
    """The pages, the eviction, the copies and the load of one request. `index` is its number in block tables."""

    def __init__(self, parts: CacheParts, policy: EvictionPolicy, num_uncomputed_tokens: int):
        """Open a row for a request with so many uncomputed tokens and this resolved policy. It owns no pages yet."""
        windows = [group.windows(policy) for group in parts.planner.groups]
        self.parts = parts
        self.policy = policy
        self.groups: Sequence[BlockTables] = parts.slots.tables
        self.has_states = any(tables.is_state for tables in self.groups)
        self.tables = self.groups[0]
        self.index = parts.slots.open_row(windows, policy.plan.fresh_tokens(num_uncomputed_tokens))
        self.evictors: list[BudgetEvictor] = []  # of each KV cache group that evicts; they do at the same tokens
        self.snapshots: list[RingSnapshot] = []  # of the rings of each group, during a scoring pass
        self.copy: QuantizedCopy | None = None  # that a drafter attends to
        self.load: LayerLoader | None = None  # until the step after which the prefix is loaded
        self.is_sparse = False  # whether the row holds only the important tokens of its prefix
        self.is_resumed = False  # whether it began with a selection of the text's tokens, in any order
        self.depends_on_text_alone = True  # false where it went on from an answer: what is kept depends on turns
        self.demand = Demand(policy)
        self.prompt_len = 0
        self.due: list[HeldCheckpoint] = []  # that it is given when it has computed more
        self.unstored: dict[bytes, TextCheckpoint] = {}  # that wait until the pages of its text may be kept
        self.text: SeenText | None = None  # in the history of the prefix cache
        parts.rows[self.index] = self
        if policy.has_budget:
            with self._closed_on_error():
                self.open_evictors(cast(BudgetPolicy, policy))

    def open_evictors(self, policy: BudgetPolicy) -> None:
        """Let the empty row evict under a resolved policy."""
        self.evictors = []
        for tables, planner in zip(self.groups, self.parts.planner.groups, strict=True):
            if len(tables.full_layers(self.index)):
                transform = self.parts.key_transform
                evictor = BudgetEvictor(policy, tables, self.index, transform, planner.pages_after_demotion)
                self.evictors.append(evictor)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the row where opening it raises an error: nobody else could."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # ---- before a step -------------------------------------------------------------------------------------------

    def attach_prefix(self, query: PrefixQuery, was_preempted: bool = False, explain: bool = False) -> AttachedPrefix:
        """Begin with cached pages; those in tiers are being read when this returns, see PrefixCache.attach.

        `explain`: find out why there are no more of them.
        """
        prefix_cache = self.parts.prefix_cache
        if explain:
            prefix_cache.keep_history()
        self.demand = Demand(query.policy, query.seed, query.max_length)
        start = prefix_cache.find(query.text, self.demand)
        self.text = prefix_cache.record_text(query.text, query.policy)
        begun = prefix_cache.attach(self, start, was_preempted)
        self.load = begun.load
        self.is_sparse = begun.is_sparse
        self.due = list(begun.due)
        why = explain_prefix(prefix_cache, start, begun.position, self.text) if explain else None
        branch_point = start.branch_point if start.branch_point > begun.position else 0
        return AttachedPrefix(begun.position, branch_point, why, begun.state_load)

    def fork(self, policy: EvictionPolicy, num_computed_tokens: int) -> Row | None:
        """Open a row that continues the text of this one under its own policy.

        Full pages that neither row will write are shared, the others copied. None where there is no row or no page, or
        where this row holds only a selection of its text's tokens.
        """
        if not self.tables.free_rows or self.is_sparse or self.is_resumed:
            return None
        new = Row(self.parts, policy, num_computed_tokens)
        can_share = not self.evictors and not new.evictors
        with new._closed_on_error():
            has_slots = self.parts.slots.fork_row(self.index, new.index, num_computed_tokens, can_share)
            if has_slots and new.reserve(num_computed_tokens):  # what it evicts at once may need pages, too
                return new
        new.close()
        return None

    def reserve(self, end_position: int, scoring: bool = False) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few.

        `scoring`: the step computes a scoring pass, which `rollback` undoes.
        """
        if scoring and not self.snapshots:
            computed = cast(BudgetPolicy, self.policy).prompt_len
            self.snapshots = [RingSnapshot(t, self.index, computed) for t in self.groups]
        if not self.evictors:
            return self.parts.slots.reserve(self.index, end_position)
        for evictor in self.evictors:
            evictor.begin_reserve()
        return self.parts.slots.reserve(self.index, end_position) and (
            self._reserve_eviction(end_position) or self._reserve_eviction_alone(end_position)
        )

    def _reserve_eviction(self, end_position: int) -> bool:
        return all(evictor.finish_reserve(end_position) for evictor in self.evictors)

    def _reserve_eviction_alone(self, end_position: int) -> bool:
        """Reserve what an eviction takes once no cached text holds pages of the row: then it may write into its own."""
        have_gone = [evictor.shared.evict_holders() for evictor in self.evictors]
        return any(have_gone) and self._reserve_eviction(end_position)

    def tokens_until_eviction(self, num_computed_tokens: int) -> int:
        """Return how many tokens can be computed before the row evicts, gets masses, or keeps a snapshot of states.

        A step must not pass that point.
        """
        next_eviction = self.evictors[0].next_eviction if self.evictors else UNBOUNDED
        next_snapshot = UNBOUNDED
        if self.has_states:  # those of earlier positions are gone after a step
            end = num_computed_tokens + self.parts.prefix_cache.ladder.interval  # there is a rung by then
            next_snapshot = next(iter(self.snapshot_positions(num_computed_tokens, end)), UNBOUNDED)
        return min(next_eviction, next_snapshot, *self._due_positions()) - num_computed_tokens

    @property
    def max_step_tokens(self) -> int:
        """Tokens that one step may compute: a ring that was shrunk has room for one block."""
        is_shrunk = self.tables.rings_shrunk[self.index]
        return self.tables.block_size if is_shrunk else self.parts.slots.max_batched_tokens

    def shrink_budget(self, num_computed_tokens: int) -> bool:
        """Halve the row's budget where its policy allows it. Returns whether pages were freed."""
        have_freed = [evictor.shrink(num_computed_tokens) for evictor in self.evictors]
        return any(have_freed)

    # ---- after a step --------------------------------------------------------------------------------------------

    def finish_load(self) -> LoadStats | None:
        """End the load of what the row began with, after the step. Where it failed, the row must start again."""
        load = self.load
        self.load = None
        if load is None:
            return None
        if load.finish() and not self.evictors and not self.is_sparse:
            load.delete_loaded_spans()  # the tree will have them
        finished_at = load.started_at + load.read_seconds
        return LoadStats(load.started_at, finished_at, load.num_tokens, load.bytes_read, load.failed)

    def _due_positions(self) -> list[int]:
        return [held.kind.due_at(0, held.checkpoint) for held in self.due]

    def restore_masses(self, num_computed_tokens: int) -> None:
        """Give the row the checkpoints that are due at this position."""
        for held, position in zip(list(self.due), self._due_positions(), strict=True):
            if position <= num_computed_tokens:
                self.due.remove(held)
                held.kind.attach(self, num_computed_tokens, held.checkpoint)

    def store_prefix(self, entry: PrefixEntry, still_running: bool = False) -> None:
        """Keep what the row leaves of its text for others."""
        shares = not self.load and not self.is_sparse and self._may_share_pages(entry.num_computed, still_running)
        self._leave(entry, Moment(entry.length, entry.num_computed, still_running, shares))

    def _leave(self, entry: PrefixEntry, moment: Moment) -> None:
        self.demand = Demand(entry.policy, entry.seed)
        self.prompt_len = entry.prompt_len
        cache = self.parts.prefix_cache
        num_stored = cache.store(self, entry.text, moment, entry.begun_at)
        if num_stored and cache.tree.history and self.text:
            cache.tree.history.store(self.text, entry.text.tokens[: entry.length].copy(), num_stored)

    def _may_share_pages(self, num_computed_tokens: int, still_running: bool) -> bool:
        """Return whether others may hold the pages of the row's text: it has evicted nothing.

        Where it is about to do so, it owns the pages that it then needs from now on. Otherwise pages of a row that goes
        on may not be shared where its queries add mass to their slots.
        """
        if any(e.has_holes for e in self.evictors) or self.policy.scoring_chunk:
            return False
        if not still_running:
            return True
        if any(e.num_places_written(num_computed_tokens) for e in self.evictors):
            return all(e.reserve_all(num_computed_tokens) for e in self.evictors)
        return not self.policy.score_key

    def is_at_chunk_end(self, num_computed_tokens: int) -> bool:
        """Return whether a streamed prompt was just evicted from, where others may leave it.

        That is the last such moment before the prompt's end, and before each rung of the ladder.
        """
        if not self.evictors or not self.policy.streamed_key or not self.depends_on_text_alone:
            return False
        evictor = self.evictors[0]
        if not evictor.has_holes or not evictor.holes_from == num_computed_tokens >= evictor.first_eviction:
            return False
        end = evictor.policy.prompt_len
        following = evictor.next_eviction
        crossed = self.parts.prefix_cache.ladder.crossed(num_computed_tokens, following)
        return num_computed_tokens < end and (following == end or bool(crossed))

    def store_chunk_end(self, entry: PrefixEntry) -> None:
        """Keep a copy of the state that the row has at the end of a chunk, for other texts that begin alike."""
        self._leave(entry, Moment(entry.length, entry.num_computed, is_running=True, has_evicted=True))

    def snapshot_positions(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions after `begin`, up to `end`, where a long text keeps snapshots, if it needs any."""
        positions = self.parts.prefix_cache.ladder.crossed(begin, end)  # most steps cross none: nothing else is asked
        slides = positions and any(len(t.ring_layers(self.index)) for t in self.groups)
        return positions if slides and (not self.evictors or not self.policy.score_key) else ()

    def rollback(self, num_computed_tokens: int) -> None:
        """Drop a chunk of a scoring pass: slots from that position on are holes, and rings are as they were."""
        for snapshot in self.snapshots:
            snapshot.restore(num_computed_tokens)

    def evicts_at(self, num_computed_tokens: int) -> bool:
        """Return whether the row must evict when so many tokens are computed."""
        return bool(self.evictors) and any(num_computed_tokens >= e.next_eviction for e in self.evictors)

    def commit(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Count a step: without uncomputed tokens rings shrink to their windows.

        Where the budget is full, `KVCacheManager.evict` must follow: it evicts from all such rows.
        """
        for snapshot in self.snapshots:
            snapshot.free()
        self.snapshots = []
        if self.evicts_at(num_computed_tokens):
            self.parts.due[self] = num_computed_tokens
        if not num_uncomputed_tokens:
            self.parts.slots.shrink_rings(self.index, num_computed_tokens)

    def close(self) -> list[int]:
        """Free the row and its pages. Returns the most slots that one head owned, in each layer with a cache."""
        if self.text:
            self.text.is_running = False
        if self.load:
            self.load.cancel()  # it writes into the row's pages
        peaks = self.parts.slots.peak_slots_per_layer(self.index)
        self.drop_copy()
        self.tables.pool.free(self.extra_pages)
        for evictor in self.evictors:
            self.parts.num_evicted_slots[policies.name_of(evictor.policy)] += evictor.num_evicted
        self.parts.slots.close_row(self.index)
        self.parts.due.pop(self, None)
        del self.parts.rows[self.index]
        return peaks

    # ---- copies for drafts ---------------------------------------------------------------------------------------

    def extend_copy(self, dtype: torch.dtype, num_tokens: int) -> bool:
        """Copy more of the first `num_tokens` tokens in slots of fewer bits. Returns whether all are copied now.

        See QuantizedCopy.extend.
        """
        self.copy = self.copy or self.parts.copies.open(self.index, dtype)
        return self.copy.extend(num_tokens)

    def drop_copy(self) -> None:
        """Free the pages of the copy."""
        if self.copy:
            self.copy.free()
            self.copy = None

    def clear_masses(self) -> None:
        """Forget the attention that the slots of the row received."""
        for t in self.groups:
            t.kv.mass[t.kv.to_index(t.pages[self.index][t.owned(self.index)])] = 0

    # ---- statistics ----------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages that the row owns now, of all layers and heads, without the copy for drafts."""
        return len(self.parts.slots.page_list([self.index])) + len(self.extra_pages)

    @property
    def extra_pages(self) -> Ints:
        """Pages that the row holds beside its tables: scratch pages, and copies of its rings."""
        scratch = [evictor.scratch_pages for evictor in self.evictors]
        return np.concatenate([np.zeros(0, np.int32), *scratch, *(snapshot.pages for snapshot in self.snapshots)])

    @property
    def slots_per_layer(self) -> list[int]:
        """Slots that the largest head owns now, in each layer that has a cache."""
        return self.parts.slots.slots_per_layer(self.index)

    def positions(self) -> list[list[list[int]]]:
        """List the positions in the slots of every head of every layer that has a cache, ascending."""
        return self.parts.slots.positions(self.index)

    def record_attention(self, trace: AttentionTrace, num_computed_tokens: int) -> None:
        """Record which tokens every head keeps, and their masses."""
        trace.record(self.groups, self.index, num_computed_tokens)

    def record_attention_if_due(self, trace: AttentionTrace, num_computed_tokens: int) -> None:
        """Record them before `commit`, if the row must evict then or the last record is old."""
        evicts_now = self.evicts_at(num_computed_tokens)
        trace.record_if_due(self.groups, self.index, num_computed_tokens, evicts_now)
