"""Rows: what the cache has of one running request, from `KVCacheManager.open` to `Row.close`.

A row is a timeline. It starts with a cached prefix, or as a fork of another row. `next_stop` says at which position
something is due next, and `advance` does what is due where a step ended. Closing a row leaves its prefix to others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import Demand, Moment, TextCheckpoint
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.draft_head_policy import DraftHeadPolicy
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.query_blocks import QueryBlocks
from retain.kv.eviction.view import KeyTransform
from retain.kv.journal import CacheJournal, journaled
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.kv.memory.grouped_cache import GroupedKVCache
from retain.kv.memory.quantized_copies import QuantizedCopies, QuantizedCopy
from retain.kv.memory.saved_rings import SavedRings
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.diagnosis import explain_prefix
from retain.kv.prefix.start import Begun, HeldCheckpoint, Start
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
    prefix_cache: PrefixCache
    copies: QuantizedCopies
    key_transform: KeyTransform
    journal: CacheJournal | None = None  # of calls that other ranks repeat
    rows: dict[int, Row] = field(default_factory=dict)
    due: dict[Row, bool] = field(default_factory=dict)  # rows that must evict or shrink rings, and whether the latter
    num_evicted_slots: Counter[str] = field(default_factory=Counter)  # of closed rows, by policy


class Row:
    """The pages, the eviction, the copies and the load of one request. `index` is its number in block tables."""

    def __init__(self, parts: CacheParts, policy: EvictionPolicy, num_uncomputed_tokens: int):
        """Open a row for a request with so many uncomputed tokens and this resolved policy. It owns no pages yet."""
        windows = [group.windows(policy) for group in parts.planner.groups]
        self.parts = parts
        self.policy = policy
        self.index = parts.slots.open_row(windows, policy.plan.fresh_tokens(num_uncomputed_tokens))
        self.task: RowTask | None = None  # once it has started; a row that never does leaves nothing to others
        self.num_computed = 0
        self.begun_at = 0  # the cached tokens that the request first began with
        self.found = Begun()  # what it began with
        self.evictors: list[BudgetEvictor] = []  # of each KV cache group that evicts; they do at the same tokens
        self.saved_rings: list[SavedRings] = []  # of the rings of each group, during a scoring pass
        self.copy: QuantizedCopy | None = None  # that a drafter attends to
        self.load: LayerLoader | None = None  # until the step after which the prefix is loaded
        self.has_failed = False  # the prefix could not be loaded: the request must start again
        self.is_resumed = False  # whether it began with a selection of the text's tokens, in any order
        self.depends_on_text_alone = True  # false where it went on from an answer: what is kept depends on turns
        self.due: list[HeldCheckpoint] = []  # that it is given when it has computed more
        self.unstored: dict[bytes, TextCheckpoint] = {}  # that wait until the pages of its text may be kept
        parts.rows[self.index] = self
        if isinstance(policy, BudgetPolicy):
            with self._closed_on_error():
                self.open_evictors(policy)

    @property
    def groups(self) -> Sequence[BlockTables]:
        """The tables of each KV cache group."""
        return self.parts.slots.tables

    @property
    def tables(self) -> BlockTables:
        """Those of the first group: its rows are those of all groups."""
        return self.parts.slots.tables[0]

    def open_evictors(self, policy: BudgetPolicy) -> None:
        """Let the empty row evict under a resolved policy."""
        self.evictors = []
        for tables in self.groups:
            if len(tables.full_layers(self.index)):
                own = DraftHeadPolicy.of(policy) if tables.group.is_draft else policy
                self.evictors.append(BudgetEvictor(own, tables, self.index, self.parts.key_transform))

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the row where opening it raises an error: nobody else could."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def may_exchange(self, method: str) -> bool:
        """Return whether ranks compare heads in a call of this method."""
        if not self.evictors or not self.policy.compares_heads:
            return False
        return method == "shrink" or (method == "advance" and self.evictors[0].query_blocks.next_end < UNBOUNDED)

    # ---- before a step -------------------------------------------------------------------------------------------

    @journaled
    def start(self, task: RowTask, found: Start) -> Begun:
        """Begin with what `PrefixCache.find` has found of a text.

        Pages in tiers are being read when this returns: see PrefixCache.attach.
        """
        self.task = task
        cache = self.parts.prefix_cache
        if task.explain:
            cache.keep_history()
        self.found = cache.attach(self, found, was_preempted=task.begun_at is not None)
        self.load = self.found.load
        self.due = list(self.found.due)
        self._begin_at(self.found.position)
        self.begun_at = self.num_computed if task.begun_at is None else task.begun_at
        if not task.explain:
            return self.found
        return replace(self.found, diagnosis=explain_prefix(cache, found, self.num_computed, self.found.seen))

    def start_ahead(self, task: RowTask, found: Start) -> None:
        """Begin with what tiers have of a text that a request will ask for. The row is closed when that is loaded."""
        self.task = task
        with self._closed_on_error():
            self.found = self.parts.prefix_cache.load_ahead(self, found)
        self.load = self.found.load
        self._begin_at(self.found.position)
        self.begun_at = self.num_computed

    @journaled
    def fork(self, policy: EvictionPolicy, num_computed_tokens: int, task: RowTask | None = None) -> Row | None:
        """Open and start a row that continues the text of this one under its own policy.

        Full pages that neither row will write are shared, the others copied. None where there is no row or no page, or
        where this row holds only a selection of its text's tokens.
        """
        if not self.tables.free_rows or self.found.is_sparse or self.is_resumed:
            return None
        new = Row(self.parts, policy, num_computed_tokens)
        can_share = not self.evictors and not new.evictors
        with new._closed_on_error():
            has_slots = self.parts.slots.fork_row(self.index, new.index, num_computed_tokens, can_share)
            has_slots = has_slots and new._takes_queries(self.evictors, num_computed_tokens)
            if has_slots and new.reserve(num_computed_tokens):  # what it evicts at once may need pages, too
                new.task = task
                new._begin_at(num_computed_tokens)
                return new
        new.close()
        return None

    def _takes_queries(self, leaders: Sequence[BudgetEvictor], position: int) -> bool:
        """Share the newest queries that another row holds of this text. False if they are missing."""
        held: list[QueryBlocks | None] = [e.query_blocks for e in leaders]
        held = held or [None] * len(self.evictors)
        pairs = zip(self.evictors, held, strict=bool(self.evictors))
        return all(mine.query_blocks.share_newest(theirs, position) for mine, theirs in pairs)

    def _begin_at(self, position: int) -> None:
        self.num_computed = position
        for evictor in self.evictors:
            evictor.query_blocks.begin(max([position, *self._due_positions]))  # masses that are due overwrite others

    @journaled
    def reserve(self, end_position: int) -> bool:
        """Own the pages of all positions below `end_position`. False when the pool has too few.

        Where they are those of a scoring pass, the end of its chunk drops what they hold.
        """
        if self._scoring and not self.saved_rings:
            self.saved_rings = [SavedRings(t, self.index, self.prompt_len) for t in self.groups]
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

    def next_stop(self, position: int) -> int:
        """Return the first position behind this one where something is due, or where a step must end.

        A step that begins at `position` must not pass it.
        """
        if self._scoring:
            return position + self._scoring.chunk_left
        room = min(tables.rings[self.index].room for tables in self.groups)  # a fork has its leader's rings
        stops = [position + room, *self._due_positions, self.found.branch_point, self._turn_end]
        if self.evictors:
            stops += [self.evictors[0].next_eviction, self.evictors[0].query_blocks.next_end]
        if any(tables.is_state for tables in self.groups):  # those of earlier positions are gone after a step
            stops += self._rungs(position, position + room)[:1]
        if self.task and self.task.stops_at_prompt_end:
            stops.append(self.task.prompt_len)
        return min(stop for stop in stops if stop > position)

    @property
    def _scoring(self) -> ScoringProgress | None:
        """The scoring pass that is due."""
        return self.task.find_scoring(self.num_computed) if self.task else None

    def count_held(self, num_computed_tokens: Ints) -> Ints:
        """Return how many slots of a head without a window have a token, a mean, when so many [n] are computed.

        Those are of the present interval: what evicts later drops more. A draft head's layer does not count.
        """
        dropped = [e.num_dropped for e in self.evictors if not e.tables.group.is_draft]
        mean = sum(int(d.sum()) for d in dropped) // max(sum(d.size for d in dropped), 1)
        return num_computed_tokens - np.int32(mean)

    @journaled
    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the row's budget where its policy allows it. Returns whether pages were freed."""
        have_freed = [evictor.shrink(num_computed_tokens) for evictor in self.evictors]
        return any(have_freed)

    # ---- after a step --------------------------------------------------------------------------------------------

    @journaled
    def finish_load(self) -> LoadStats | None:
        """End the load of what the row began with, after the step. Where it failed, the row must start again."""
        load = self.load
        self.load = None
        if load is None:
            return None
        is_loaded = load.finish()
        is_loaded = self.parts.prefix_cache.agreement.is_shared(is_loaded) and is_loaded
        if is_loaded and not self.evictors and not self.found.is_sparse:
            load.delete_loaded_spans()  # the tree will have them
        self.has_failed = not is_loaded
        finished_at = load.started_at + load.read_seconds
        return LoadStats(load.started_at, finished_at, load.num_tokens, load.bytes_read, self.has_failed)

    @journaled
    def advance(self, num_computed_tokens: int, num_uncomputed_tokens: int) -> None:
        """Do what is due where a step ended, but for what gives slots up.

        That is done by `KVCacheManager.evict`, which must follow. The row may be forked before. It evicts where the
        budget is full; without uncomputed tokens, rings shrink to their windows.
        """
        before = self.num_computed
        self.num_computed = num_computed_tokens
        for evictor in self.evictors:
            evictor.score_queries(num_computed_tokens)
        self._leave_what_is_due(before)
        scoring = self._scoring
        if scoring is None or not scoring.chunk_offset:  # the end of a chunk: its slots are holes again
            for saved in self.saved_rings:
                saved.restore(self.num_computed)
        if scoring:
            return
        if self.task and self.task.trace:
            self.task.trace.record_if_due(self.groups, self.index, num_computed_tokens, self.must_evict)
        for saved in self.saved_rings:
            saved.free()
        self.saved_rings = []
        rings_shrink = not num_uncomputed_tokens and not self.tables.rings[self.index].are_shrunk
        if self.must_evict or rings_shrink:
            self.parts.due[self] = rings_shrink

    @property
    def must_evict(self) -> bool:
        """Whether the budget is full."""
        return any(self.num_computed >= e.next_eviction for e in self.evictors)

    def finish_eviction(self, rings_shrink: bool) -> None:
        """Do what is due after an eviction: rings shrink, and others may leave a streamed prompt at a chunk's end."""
        if rings_shrink:
            self.parts.slots.shrink_rings(self.index, self.num_computed)
        if self._is_at_chunk_end():
            self._leave(Moment(self.num_computed, self.num_computed, is_running=True, has_evicted=True))

    @journaled
    def close(self) -> RequestMemory:
        """Leave the prefix to others; free the row and its pages, also where that fails. Returns what it owned."""
        final_slots = self.parts.slots.slots_per_layer(self.index)
        num_pages = self.num_pages
        try:
            if self.task and not self.has_failed:
                if self.task.trace:
                    self.record_attention(self.task.trace)
                self._leave_text(min(self.num_computed, len(self.task.text)))
        finally:
            peaks = self.parts.slots.peak_slots_per_layer(self.index)
            self._free()
        return RequestMemory(peaks, final_slots, num_pages)

    def _free(self) -> None:
        if self.found.seen:
            self.found.seen.is_running = False
        if self.load:
            self.load.cancel()  # it writes into the row's pages
        self.drop_copy()
        self.tables.pool.free(self.extra_pages)
        for evictor in self.evictors:
            self.parts.num_evicted_slots[policies.name_of(self.policy)] += evictor.num_evicted
        self.parts.slots.close_row(self.index)
        self.parts.due.pop(self, None)
        del self.parts.rows[self.index]

    # ---- copies for drafts ---------------------------------------------------------------------------------------

    def extend_copy(self, dtype: torch.dtype, num_tokens: int) -> bool:
        """Copy more of the first `num_tokens` tokens in slots of fewer bits. Returns whether all are copied now.

        See QuantizedCopy.extend.
        """
        self.copy = self.copy or QuantizedCopy(self.parts.copies, self.index, dtype)
        return self.copy.extend(num_tokens)

    def drop_copy(self) -> None:
        """Free the pages of the copy."""
        if self.copy:
            self.copy.free()
            self.copy = None

    @journaled
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
        return np.concatenate([np.zeros(0, np.int32), *scratch, *(saved.pages for saved in self.saved_rings)])

    def positions(self) -> list[list[list[int]]]:
        """List the positions in the slots of every head of every layer that has a cache, ascending."""
        return self.parts.slots.positions(self.index)

    def record_attention(self, trace: AttentionTrace) -> None:
        """Record which tokens every head keeps, and their masses."""
        trace.record(self.groups, self.index, self.num_computed)

    # ---- prefixes ------------------------------------------------------------------------------------------------

    @property
    def demand(self) -> Demand:
        """What the row asks the prefix cache for, and leaves to it."""
        return self.task.demand(self.policy) if self.task else Demand(self.policy)

    @property
    def prompt_len(self) -> int:
        """The number of tokens of the prompt; 0 without a task."""
        return self.task.prompt_len if self.task else 0

    @property
    def _due_positions(self) -> list[int]:
        return [held.kind.due_at(0, held.checkpoint) for held in self.due]

    def _leave_what_is_due(self, before: int) -> None:
        """Take checkpoints that are due, and leave some at the prompt's end, the branch point and rungs."""
        now = self.num_computed
        for held, position in zip(list(self.due), self._due_positions, strict=True):
            if position <= now:
                self.due.remove(held)
                held.kind.attach(self, now, held.checkpoint)
        ends_blocks = bool(self.evictors) and not self.due and now == self.evictors[0].query_blocks.last_start
        if before < self.prompt_len <= now or now in (self.found.branch_point, self._turn_end) or ends_blocks:
            self._leave_text(now, is_running=True)
        for position in self._rungs(before, now):
            self._leave_text(position, is_running=True)

    def _leave_text(self, position: int, is_running: bool = False) -> None:
        """Leave the text up to a position to others, unless the row holds or waits for a part of it."""
        shares = not self.load and not self.found.is_sparse and self._may_share_pages(is_running)
        self._leave(Moment(position, self.num_computed, is_running, shares))

    def _leave(self, moment: Moment) -> None:
        if not self.task or moment.position > len(self.task.text):  # accepted drafts may lie behind the answer's end
            return
        cache = self.parts.prefix_cache
        num_stored = cache.store(self, self.task.text, moment, self.begun_at)
        if num_stored and cache.tree.history and self.found.seen:
            cache.tree.history.store(self.found.seen, self.task.text.tokens[: moment.position].copy(), num_stored)

    def _may_share_pages(self, is_running: bool) -> bool:
        """Return whether others may hold the pages of the row's text: it has evicted nothing.

        Where it is about to do so, it owns the pages that it then needs from now on. Otherwise pages of a row that goes
        on may not be shared where its queries add mass to their slots.
        """
        if any(e.has_holes for e in self.evictors) or self.policy.scoring_chunk:
            return False
        if not is_running:
            return True
        if any(e.num_pages_written(self.num_computed) for e in self.evictors):
            return all(e.reserve_all(self.num_computed) for e in self.evictors)
        return not self.policy.score_key

    def _is_at_chunk_end(self) -> bool:
        """Return whether a streamed prompt was just evicted from, where others may leave it.

        That is the last such moment before the prompt's end, and before each rung of the ladder.
        """
        if not self.evictors or not self.policy.streamed_key or self.num_computed >= self.prompt_len:
            return False
        following = self.evictors[0].next_eviction
        return following == self.prompt_len or bool(
            self.parts.prefix_cache.ladder.crossed(self.num_computed, following)
        )

    @property
    def _turn_end(self) -> int:
        """The position at which the row leaves what its rings and states hold, since later turns part there; or 0."""
        if not self.task or not self.task.turn_end or self.evictors:
            return 0
        needs_checkpoint = any(t.is_state or len(t.ring_layers(self.index)) for t in self.groups)
        return self.task.turn_end if needs_checkpoint else 0

    def _rungs(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions after `begin`, up to `end`, where a long text keeps what its rings hold."""
        rungs = self.parts.prefix_cache.ladder.crossed(begin, end)  # most steps cross none: nothing else is asked
        slides = rungs and any(len(t.ring_layers(self.index)) for t in self.groups)
        return rungs if slides and (not self.evictors or not self.policy.score_key) else ()
