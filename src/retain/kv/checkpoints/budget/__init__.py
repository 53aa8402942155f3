"""What a row with a budget has kept: another row of the same text goes on from it under the same policy.

A row leaves it when it ends, and, of a streamed prompt, at the ends of chunks, where others may leave the text. Who
goes on copies its pages, for a row that evicts writes into all of its pages sooner or later. Rings are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import NOWHERE, CheckpointedRow, Demand, Key, Moment, Reach, SpanContent
from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.checkpoints.budget.metadata import CheckpointShape, decode_metadata, encode_metadata, with_pages
from retain.kv.checkpoints.budget.resumption import plan_resumption
from retain.kv.checkpoints.masses import read_masses, write_masses
from retain.kv.checkpoints.windows_and_states import capture_rings
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import EvictorState, Resumption, used_pages
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.kv.stores.span import Span
from retain.kv.text import hash_key
from retain.types import Ints


class CheckpointKind:
    """Leave what a budget has kept, and go on from it: a checkpoint that stands in for pages."""

    needs_pages = False

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner):
        self.groups = groups
        self.planner = planner

    def keys(self, demand: Demand) -> Sequence[Key]:
        """Return a key for the ends of rows and one for the ends of chunks, as far as others may go on from there."""
        policy = demand.policy
        if not isinstance(policy, BudgetPolicy):
            return ()
        ended = [Key(_name(demand, b"ended", policy.resume_key))] if policy.resume_key else []
        streamed = [Key(_name(demand, b"streamed", policy.streamed_key), policy.prompt_len - 1)]
        return [*ended, *(streamed if policy.streamed_key else [])]

    def reach(self, demand: Demand, checkpoint: BudgetCheckpoint | None) -> Reach:
        """Return the position of a checkpoint, if the row is then as if it had never paused."""
        if checkpoint is None or self._plan(demand, checkpoint) is None:
            return NOWHERE
        return Reach(checkpoint.position, checkpoint.position)

    def _plan(self, demand: Demand, checkpoint: BudgetCheckpoint) -> Resumption | None:
        """Plan how a row goes on. None where it cannot: the whole prompt must fit into the pool, too.

        One inside a prompt must have seen no more than the prompt, and the masses that this policy gives.
        """
        policy = demand.policy
        assert isinstance(policy, BudgetPolicy)
        p = checkpoint.position
        if checkpoint.in_prompt and not (p < policy.prompt_len and policy.weighs_alike(checkpoint.policy, p)):
            return None
        states = zip(checkpoint.groups, checkpoint.evictors, strict=True)
        own = [state for g, state in states if not self.groups[g].group.is_draft]
        plan = plan_resumption(checkpoint, policy, own)
        n = plan and max(plan.policy.prompt_len, p)
        if not plan or not n or self.planner.pages_needed(plan.policy, n, n) >= self.groups[0].pool.num_pages:
            return None
        return plan

    # ---- capturing -----------------------------------------------------------------------------------------------

    def capture(self, row: CheckpointedRow, moment: Moment) -> Mapping[bytes, BudgetCheckpoint]:
        """Hold what a row keeps when it ends, or copy it at the end of a chunk of its prompt."""
        policy = row.demand.policy
        if not row.evictors:
            return {}
        first = row.evictors[0]
        n = moment.num_computed
        if moment.has_evicted:
            is_chunk = first.has_holes and first.holes_from == n >= first.first_eviction
            found = self._copy(row, n) if policy.streamed_key and row.depends_on_text_alone and is_chunk else None
            return {_name(row.demand, b"streamed", policy.streamed_key): found} if found else {}
        has_begun = max(first.compacts_at, 1) <= n < first.next_eviction and not first.has_shrunk
        if moment.is_running or moment.position != n or not has_begun or not policy.resume_key:
            return {}
        found = self._hold(row, n)
        return {_name(row.demand, b"ended", policy.resume_key): found} if found else {}

    def _hold(self, row: CheckpointedRow, position: int) -> BudgetCheckpoint | None:
        """Return what a row has after `position` tokens, whose pages are held once more.

        None where nothing can go on from it: too much of a window is overwritten.
        """
        windows = None
        if any(len(t.ring_layers(row.index)) for t in self.groups):
            windows = capture_rings(self.groups, row.index, position)
            if windows is None:
                return None
        policy = row.evictors[0].policy
        with self.groups[0].pool.owned() as owned:
            if windows:
                owned.append(windows.page_list)
            parts = tuple(e.capture_state(position) for e in row.evictors)
            masses = read_masses(self.groups, row.index, position) if policy.score_key and parts[0].is_dense else ()
            groups = tuple(g for g, t in enumerate(self.groups) if len(t.full_layers(row.index)))
            found = BudgetCheckpoint(position, policy, parts, groups, windows, masses=masses)
            self.groups[0].pool.incref(found.own_pages)
        return found

    def _copy(self, row: CheckpointedRow, position: int) -> BudgetCheckpoint | None:
        """Return what a row that goes on has, in pages of its own. Its rings are shared from now on.

        None where nothing can go on from it, or the pool has no pages.
        """
        pool = self.groups[0].pool
        held = self._hold(row, position)
        if held is None:
            return None
        if not pool.ensure_free(len(held.own_pages)):
            pool.free(held.page_list)
            return None
        for t in self.groups if held.windows else ():
            t.note_shared_rings(row.index, position)
        parts = []
        with pool.owned() as owned:
            owned.append(held.page_list)
            for evictor, part in zip(row.evictors, held.evictors, strict=True):
                parts.append(_copy_part(evictor, part, owned))
        pool.free(held.own_pages)
        return replace(held, evictors=tuple(parts), in_prompt=True)

    # ---- attaching -----------------------------------------------------------------------------------------------

    def num_own_pages(self, row: CheckpointedRow, position: int, checkpoint: BudgetCheckpoint) -> int:
        """Count all that the row will own before its first eviction."""
        plan = self._plan(row.demand, checkpoint)
        assert plan
        found = len(checkpoint.own_pages)
        for g, part, slots in zip(checkpoint.groups, checkpoint.evictors, plan.slots, strict=True):
            own = plan.policy.kv_heads.largest(slots)
            found += int(np.maximum(-(-own // self.groups[g].page_size) - part.counts, 0).sum())
        return found + (checkpoint.windows.num_own_pages(self.groups, position) if checkpoint.windows else 0)

    def due_at(self, position: int, checkpoint: BudgetCheckpoint) -> int:
        """Return the position: the row begins with what was kept."""
        return position

    def attach(self, row: CheckpointedRow, position: int, checkpoint: BudgetCheckpoint) -> None:
        """Copy what was kept into the tables of the row, and let it evict as if it had never paused."""
        plan = self._plan(row.demand, checkpoint)
        assert plan
        index = row.index
        for t in self.groups:
            t.allocated_upto[index] = position
            t.rings[index].written_upto = position
        if checkpoint.windows:
            checkpoint.windows.attach(self.groups, index, position)
        for g, part in zip(checkpoint.groups, checkpoint.evictors, strict=True):
            t = self.groups[g]
            layers = t.full_layers(index)
            width = part.pages.shape[-1]
            t.pages[index, layers, :, :width] = _copy_tables(t.store, part.pages, part.counts)
            t.counts[index, layers] = part.counts
            t.peaks[index] = t.counts[index]
            t.mark_dirty(index)
        if checkpoint.masses:
            write_masses(self.groups, index, position, checkpoint.masses)
        row.open_evictors(plan.policy)
        for evictor, part, slots in zip(row.evictors, checkpoint.evictors, plan.slots, strict=True):
            evictor.resume(part, plan, slots)
        row.is_resumed = not checkpoint.evictors[0].is_dense
        row.depends_on_text_alone = checkpoint.in_prompt

    # ---- in stores -----------------------------------------------------------------------------------------------

    def to_span(self, checkpoint: BudgetCheckpoint, position: int) -> SpanContent | None:
        """Return all of it. The host waits for the device."""
        return SpanContent(checkpoint, encode_metadata(checkpoint))

    def from_span(self, demand: Demand, position: int, span: Span, metadata: bytes) -> BudgetCheckpoint:
        """Decode the metadata. Raises ValueError where it does not fit the cache, the policy or the span."""
        policy = demand.policy
        assert isinstance(policy, BudgetPolicy)
        found = decode_metadata(metadata, policy, self._shape(policy), sum(span.num_blocks))
        if found.position != position or [len(run.pages) for run in found.runs()] != list(span.num_blocks):
            raise ValueError("the checkpoint of a budget does not fit its pages")
        return found

    def with_pages(self, checkpoint: BudgetCheckpoint, pages: Ints) -> BudgetCheckpoint:
        """Return the checkpoint with its slots in other pages."""
        return with_pages(checkpoint, pages)

    def _shape(self, policy: BudgetPolicy) -> CheckpointShape:
        """Return what a checkpoint of this policy must fit."""
        windows = [group.windows(policy) for group in self.planner.groups]
        return CheckpointShape(self.groups, windows, policy.kv_heads)


def _name(demand: Demand, moment: bytes, key: str) -> bytes:
    """Return the name of what rows of a policy leave at such a moment; the seed counts where masses depend on it."""
    policy = demand.policy
    noise = demand.seed.to_bytes(8, "little") if policy.uses_noise else b""
    return hash_key(moment + noise + policy.weights_fingerprint + key.encode(errors="surrogatepass"))


def _copy_part(evictor: BudgetEvictor, part: EvictorState, owned: list[Ints]) -> EvictorState:
    """Return a state with pages of its own, which are added to `owned`."""
    demoter = part.demoter
    if demoter:
        assert evictor.tables.demoted
        pages = _copy_tables(evictor.tables.demoted.store, demoter.pages, demoter.counts)
        owned.append(used_pages(pages, demoter.counts))
        scores = None if demoter.scores is None else demoter.scores.clone()
        demoter = replace(demoter, pages=pages, scores=scores)
    pages = _copy_tables(evictor.tables.store, part.pages, part.counts)
    owned.append(used_pages(pages, part.counts))
    slot_scores, scored_pos = part.scores
    return replace(part, pages=pages, scores=(slot_scores.clone(), scored_pos.clone()), demoter=demoter)


def _copy_tables(store: PageStore, pages: Ints, counts: Ints) -> Ints:
    """Return tables [M, G, n] of new pages with the content of these."""
    found = np.zeros_like(pages)
    found[np.arange(pages.shape[-1]) < counts[..., None]] = store.copy_of(used_pages(pages, counts))
    return found
