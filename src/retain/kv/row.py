"""Rows: what the cache has of one running request, from `KVCacheManager.open` to `Row.close`.

A row is a timeline. It starts with a cached prefix, or as a fork of another row. `next_stop` says at which position
something is due next, and `advance` does what is due where a step ended. Closing a row leaves its prefix to others.
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
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.prompt_masses import PromptMasses, read_masses, write_masses
from retain.kv.eviction.resumption import plan_resumption
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.grouped_cache import GroupedKVCache
from retain.kv.memory.quantized_copies import QuantizedCopies, QuantizedCopy
from retain.kv.memory.ring_snapshot import RingSnapshot
from retain.kv.prefix.cache import FoundPrefix, PrefixCache
from retain.kv.prefix.diagnosis import PrefixDiagnosis, explain_prefix
from retain.kv.prefix.null_cache import NullPrefixCache
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.prefix.resuming import attach_evicted_state
from retain.kv.row_task import RowTask, ScoringProgress
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.request import LoadStats, RequestMemory
from retain.kv.stores.loader import LayerLoader
from retain.types import Ints


@dataclass
class CacheParts:
    """What the rows of a cache share. `rows` are those that are open, by index."""

    planner: CapacityPlanner
    slots: GroupedKVCache
    prefix_cache: PrefixCache | NullPrefixCache
    copies: QuantizedCopies
    key_transform: KeyTransform
    rows: dict[int, Row] = field(default_factory=dict)
    due: dict[Row, bool] = field(default_factory=dict)  # rows that must evict or shrink rings, and whether the latter
    num_evicted_slots: Counter[str] = field(default_factory=Counter)  # of closed rows, by policy


@dataclass(frozen=True)
class AttachedPrefix:
    """What a row begins with.

    `diagnosis` says why there are no more tokens, where it was asked for. `load` is that of a state, which has ended.
    """

    num_tokens: int
    diagnosis: PrefixDiagnosis | None = None
    load: LoadStats | None = None


def prefix_query(policy: EvictionPolicy, task: RowTask) -> PrefixQuery:
    """Return what a row under this policy asks the prefix cache for."""
    return PrefixQuery(policy, task.text.ids, task.max_cached_tokens, task.text.salt, task.seed)


class Row:
    """The pages, the eviction, the copies and the load of one request. `index` is its number in block tables."""

    def __init__(self, parts: CacheParts, policy: EvictionPolicy, num_uncomputed_tokens: int):
        """Open a row for a request with so many uncomputed tokens and this resolved policy. It owns no pages yet."""
        windows = [group.windows(policy) for group in parts.planner.groups]
        self.parts = parts
        self.policy = policy
        self.index = parts.slots.open_row(windows, policy.fresh_tokens(num_uncomputed_tokens))
        self.task: RowTask | None = None  # once it has started; a row that never does leaves nothing to others
        self.num_computed = 0
        self.begun_at = 0  # the cached tokens that the request first began with
        self.found = FoundPrefix()  # what it began with
        self.evictors: list[BudgetEvictor] = []  # of each KV cache group that evicts; they do at the same tokens
        self.snapshots: list[RingSnapshot] = []  # of the rings of each group, during a scoring pass
        self.copy: QuantizedCopy | None = None  # that a drafter attends to
        self.load: LayerLoader | None = None  # until the step after which the prefix is loaded
        self.has_failed = False  # the prefix could not be loaded: the request must start again
        self.is_resumed = False  # whether it began with a selection of the text's tokens, in any order
        self.depends_on_text_alone = True  # false where it went on from an answer: what is kept depends on turns
        self.masses: PromptMasses | None = None  # of the prompt
        self.masses_due = 0  # computed tokens at which the row's slots get them; 0: they have them
        parts.rows[self.index] = self
        if policy.has_budget:
            with self._closed_on_error():
                self._open_evictors(cast(BudgetPolicy, policy))

    @property
    def groups(self) -> list[BlockTables]:
        """The tables of each KV cache group."""
        return self.parts.slots.tables

    @property
    def tables(self) -> BlockTables:
        """Those of the first group: its rows are those of all groups."""
        return self.parts.slots.tables[0]

    @property
    def is_sparse(self) -> bool:
        """Whether the row holds only the important tokens of its prefix."""
        return self.found.is_sparse

    def _open_evictors(self, policy: BudgetPolicy) -> None:
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

    def start(self, task: RowTask) -> AttachedPrefix:
        """Begin with cached pages of a text.

        Those in tiers are being read when this returns: see PrefixCache.attach.
        """
        self.task = task
        found = self._attach_prefix(prefix_query(self.policy, task), task.begun_at is not None, task.explain)
        self.num_computed = found.num_tokens
        self.begun_at = found.num_tokens if task.begun_at is None else task.begun_at
        return found

    def fork(self, policy: EvictionPolicy, num_computed_tokens: int, task: RowTask | None = None) -> Row | None:
        """Open and start a row that continues the text of this one under its own policy.

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
                new.task = task
                new.num_computed = num_computed_tokens
                return new
        new.close()
        return None

    def reserve(self, end_position: int) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few.

        Where they are those of a scoring pass, the end of its chunk drops what they hold.
        """
        if self._scoring and not self.snapshots:
            computed = cast(BudgetPolicy, self.policy).prompt_len
            self.snapshots = [RingSnapshot(t, self.index, computed) for t in self.groups]
        if not self.evictors:
            return self.parts.slots.reserve(self.index, end_position)
        return (
            all(evictor.begin_reserve() for evictor in self.evictors)
            and self.parts.slots.reserve(self.index, end_position)
            and (self._reserve_eviction(end_position) or self._reserve_eviction_alone(end_position))
        )

    def _reserve_eviction(self, end_position: int) -> bool:
        return all(evictor.finish_reserve(end_position) for evictor in self.evictors)

    def _reserve_eviction_alone(self, end_position: int) -> bool:
        """Reserve what an eviction takes once no cached text holds pages of the row: then it may write into its own."""
        have_gone = [evictor.shared.evict_holders() for evictor in self.evictors]
        return any(have_gone) and self._reserve_eviction(end_position)

    def next_stop(self, position: int) -> int:
        """Return the first position behind this one where something is due, or where a step must end.

        A step that begins at `position` must not pass it.
        """
        if self._scoring:
            return position + self._scoring.chunk_left
        is_shrunk = self.tables.rings[self.index].are_shrunk  # such a ring has room for one block
        room = self.tables.block_size if is_shrunk else self.parts.slots.max_batched_tokens
        stops = [position + room, self.masses_due, self.found.branch_point]
        if self.evictors:
            stops.append(self.evictors[0].next_eviction)
        if any(tables.is_state for tables in self.groups):  # those of earlier positions are gone after a step
            stops += self._snapshot_positions(position, position + room)[:1]
        if self.task and self.task.stops_at_prompt_end:
            stops.append(self.task.prompt_len)
        return min(stop for stop in stops if stop > position)

    @property
    def _scoring(self) -> ScoringProgress | None:
        """The scoring pass that is due."""
        return self.task.find_scoring(self.num_computed) if self.task else None

    @property
    def needs_single_step(self) -> bool:
        """Whether all tokens up to the next stop must be computed in one step."""
        return bool(self.evictors) and any(evictor.layerwise is not None for evictor in self.evictors)

    def shrink(self, num_computed_tokens: int) -> bool:
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
        self.has_failed = load.failed
        finished_at = load.started_at + load.read_seconds
        return LoadStats(load.started_at, finished_at, load.num_tokens, load.bytes_read, load.failed)

    def advance(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Do what is due where a step ended, but for what gives slots up.

        That is done by `KVCacheManager.evict`, which must follow. The row may be forked before. It evicts where the
        budget is full; without uncomputed tokens, rings shrink to their windows.
        """
        before = self.num_computed
        self.num_computed = num_computed_tokens
        if self.task:
            self._store_what_is_due(self.task, before)
        scoring = self._scoring
        if self.snapshots and (scoring is None or not scoring.chunk_offset):  # the end of a chunk
            self._rollback()
        if scoring:
            return
        if self.task and self.task.trace:
            self.task.trace.record_if_due(self.groups, self.index, num_computed_tokens, self.must_evict)
        for snapshot in self.snapshots:
            snapshot.free()
        self.snapshots = []
        rings_shrink = not num_uncomputed_tokens and not self.tables.rings[self.index].are_shrunk
        if self.must_evict or rings_shrink:
            self.parts.due[self] = rings_shrink

    def _rollback(self) -> None:
        """Drop a chunk of a scoring pass: its slots are holes, and rings are as they were."""
        for snapshot in self.snapshots:
            snapshot.restore(self.num_computed)

    @property
    def must_evict(self) -> bool:
        """Whether the budget is full."""
        return any(self.num_computed >= e.next_eviction for e in self.evictors)

    def finish_eviction(self, rings_shrink: bool) -> None:
        """Do what is due after an eviction: rings shrink, and others may leave a streamed prompt at a chunk's end."""
        if rings_shrink:
            self.parts.slots.shrink_rings(self.index, self.num_computed)
        if self.task and self._is_at_chunk_end(self.num_computed):
            self._store_chunk_end(self._prefix_entry(self.task))

    def close(self) -> RequestMemory:
        """Leave the prefix to others; free the row and its pages, also where that fails. Returns what it owned."""
        final_slots = self.slots_per_layer
        num_pages = self.num_pages
        try:
            if self.task and not self.has_failed:
                self._leave_prefix(self.task)
        finally:
            peaks = self.parts.slots.peak_slots_per_layer(self.index)
            self._free()
        return RequestMemory(peaks, final_slots, num_pages)

    def _free(self) -> None:
        if self.found.text:
            self.found.text.is_running = False
        if self.load:
            self.load.cancel()  # it writes into the row's pages
        self.drop_copy()
        self.tables.pool.free(self.extra_pages)
        for evictor in self.evictors:
            self.parts.num_evicted_slots[policies.name_of(evictor.policy)] += evictor.num_evicted
        self.parts.slots.close_row(self.index)
        self.parts.due.pop(self, None)
        del self.parts.rows[self.index]

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

    def record_attention(self, trace: AttentionTrace) -> None:
        """Record which tokens every head keeps, and their masses."""
        trace.record(self.groups, self.index, self.num_computed)

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def _store_what_is_due(self, task: RowTask, before: int) -> None:
        """Give masses back, and keep the prefix at the prompt's end, the branch point and rungs of the ladder."""
        now = self.num_computed
        self._restore_masses(now)
        if before < task.prompt_len <= now or now == self.found.branch_point:
            self._store_prefix(self._prefix_entry(task), still_running=True)
        for position in self._snapshot_positions(before, now):
            self._store_prefix(self._prefix_entry(task, position), still_running=True)

    def _leave_prefix(self, task: RowTask) -> None:
        """Keep what the row has for others when it ends."""
        if task.trace:
            self.record_attention(task.trace)
        self._store_prefix(self._prefix_entry(task))

    def _prefix_entry(self, task: RowTask, length: int = -1) -> PrefixEntry:
        """Return what the row can leave now, or its first `length` tokens. An end that was dropped is no part of it."""
        text = task.text
        return PrefixEntry(
            self.policy,
            text.ids[: self.num_computed],
            task.prompt_len,
            text.salt,
            task.seed,
            length,
            begun_at=self.begun_at,
            num_computed=self.num_computed,
        )

    def _attach_prefix(self, query: PrefixQuery, was_preempted: bool, explain: bool) -> AttachedPrefix:
        prefix_cache = self.parts.prefix_cache
        if explain:
            prefix_cache.keep_history()
        found = self._resume(query) or prefix_cache.attach(self.index, query, was_preempted)
        self.found = found
        self.load = found.load
        self.masses = found.masses
        if found.masses:
            self.masses_due = found.masses.position
            self._restore_masses(found.length)
        why = explain_prefix(prefix_cache, query, found.length, self.found.text) if explain else None
        return AttachedPrefix(found.length, why, found.state_load)

    def _resume(self, query: PrefixQuery) -> FoundPrefix | None:
        """Begin with what an earlier row of the text kept under the same policy, where there is that and room for it.

        The whole prompt must fit into the pool: a row that goes on computes it in all layers at once.
        """
        parts = self.parts
        cache = parts.prefix_cache
        state = cache.find_state(query) if self.evictors and isinstance(cache, PrefixCache) else None
        plan = state and plan_resumption(state, cast(BudgetPolicy, self.policy))
        if not state or not plan or not isinstance(cache, PrefixCache):
            return None
        n = max(plan.policy.prompt_len, plan.position)
        if parts.planner.pages_needed(plan.policy, n, n) >= self.tables.pool.num_pages:
            return None
        if not attach_evicted_state(self.groups, cache.layout, self.index, state, plan):
            return None
        self.evictors = []
        self._open_evictors(plan.policy)
        for evictor, part, slots in zip(self.evictors, state.evictors, plan.slots, strict=True):
            evictor.resume(part, plan, slots)
        self.is_resumed = not state.evictors[0].is_dense
        self.depends_on_text_alone = state.in_prompt
        load = cache.record_resumed(query, state)
        return FoundPrefix(state.position, text=cache.record_text(query), state_load=load)

    def _restore_masses(self, num_computed_tokens: int) -> None:
        """Give the slots the masses that the row began with, once all those tokens are computed, or attached.

        What the queries of the tokens in between added is overwritten.
        """
        if self.masses and num_computed_tokens == self.masses_due:
            write_masses(self.groups, self.index, self.masses.position, self.masses.masses)
            self.masses_due = 0

    def _keep_masses(self, num_computed_tokens: int) -> None:
        """Keep the masses of the prompt, where it is just computed and they depend on the text alone."""
        policy = self.policy
        if not self.evictors or not policy.score_key or policy.scoring_chunk or policy.prefill != "exact":
            return
        end = cast(BudgetPolicy, policy).prompt_len
        if num_computed_tokens != end or (self.masses and self.masses.position == end):
            return
        if self.depends_on_text_alone and not any(e.has_holes or e.layerwise for e in self.evictors):
            values = read_masses(self.groups, self.index, end)
            self.masses = PromptMasses(end, cast(BudgetPolicy, policy), values)

    def _store_prefix(self, entry: PrefixEntry, still_running: bool = False) -> None:
        """Keep the pages of the row's text for others, unless it holds or waits for a part of them.

        A row that evicts leaves its state when it ends, where that is one of the whole text.
        """
        if self.evictors and not still_running and self._has_whole_state(entry):
            self.parts.prefix_cache.store_state(entry, self.evictors)
        if still_running and self.parts.prefix_cache.enabled:
            self._keep_masses(entry.num_computed)
        if not self.load and not self.is_sparse and self._may_share_pages(entry.num_computed, still_running):
            self.parts.prefix_cache.store(self.index, entry, still_running, self.found.text)
            if self.masses and self.masses.position <= entry.length:
                self.parts.prefix_cache.store_masses(entry, self.masses)

    def _may_share_pages(self, num_computed_tokens: int, still_running: bool) -> bool:
        """Return whether others may hold the pages of the row's text: it has evicted nothing.

        Where it is about to do so, it owns the pages that it then needs from now on. Otherwise pages of a row that goes
        on may not be shared where its queries add mass to their slots.
        """
        if any(e.has_holes or e.layerwise for e in self.evictors) or self.policy.scoring_chunk:
            return False
        if not still_running:
            return True
        if any(e.num_places_written(num_computed_tokens) for e in self.evictors):
            return all(e.reserve_all(num_computed_tokens) for e in self.evictors)
        return not self.policy.score_key

    def _is_at_chunk_end(self, num_computed_tokens: int) -> bool:
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

    def _store_chunk_end(self, entry: PrefixEntry) -> None:
        """Keep a copy of the state that the row has at the end of a chunk, for other texts that begin alike."""
        self.parts.prefix_cache.store_state(entry, self.evictors, in_prompt=True)

    def _has_whole_state(self, entry: PrefixEntry) -> bool:
        """Return whether a budget has begun, no eviction is due, and all computed tokens are those of the entry."""
        n = len(entry.tokens)
        evictor = self.evictors[0]
        is_whole = entry.num_computed == n and not evictor.has_shrunk
        return is_whole and max(evictor.compacts_at, 1) <= n < evictor.next_eviction

    def _snapshot_positions(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions after `begin`, up to `end`, where a long text keeps snapshots, if it needs any."""
        positions = self.parts.prefix_cache.ladder.crossed(begin, end)  # most steps cross none: nothing else is asked
        slides = positions and any(len(t.ring_layers(self.index)) for t in self.groups)
        return positions if slides and (not self.evictors or not self.policy.score_key) else ()
