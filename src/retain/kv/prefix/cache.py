"""The prefix cache: rows begin with what the radix tree or a store has of their texts, and leave their own to it.

Keys and values depend on how far layers see, so the windows are part of a text's first link, like the tenant's salt and
the model. What a text leaves is pages and checkpoints (kv/checkpoints). A question about a text is asked once, by
`find`; `attach` gives a row what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import (
    ANYWHERE,
    AnyKind,
    CheckpointedRow,
    Demand,
    Key,
    Moment,
    Reach,
    TextCheckpoint,
    load_kinds,
)
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.memory.block_layout import block_layout
from retain.kv.memory.block_tables import EXTRA_TABLE_PAGES, BlockTables
from retain.kv.prefix.agreement import Agreement, Alone
from retain.kv.prefix.attach import attach_pages, num_own_pages, start_selective_load
from retain.kv.prefix.checkpoint_ladder import CheckpointLadder
from retain.kv.prefix.config import PrefixConfig
from retain.kv.prefix.events import PrefixObserver
from retain.kv.prefix.history import PrefixHistory, SeenText
from retain.kv.prefix.node import NO_PAGES, EvictionRecord, PrefixMatch
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.prefix.returns import ReturnTimes
from retain.kv.prefix.start import Begun, HeldCheckpoint, Start, StoredCheckpoint
from retain.kv.prefix.tiers import Tiers
from retain.kv.stats.request import LoadStats
from retain.kv.stores.loader import LayerLoader
from retain.kv.stores.offloader import Offloader
from retain.kv.stores.store import ReadJob
from retain.kv.text import Text, salt_digest
from retain.types import Ints

KindNeeds = tuple[AnyKind, Sequence[Key], Reach]  # with the keys of a policy, and where rows begin without any
Option = tuple[Reach, HeldCheckpoint | None]  # where a row may begin with a checkpoint, or without any of its kind


class Needs(NamedTuple):
    """What all rows of a policy ask of the prefix cache, whatever their texts.

    Kinds that complete pages, and those that stand in for them, have keys. No row skips more than `limit` tokens for
    what the others say. Its queries may add mass to its slots, which are its own then.
    """

    windows: Ints
    completing: Sequence[KindNeeds]
    standing: Sequence[tuple[AnyKind, Key]]
    required: frozenset[bytes]  # keys without which no text of these windows goes on
    limit: int
    adds_mass: bool


class PrefixCache:
    """Share what rows leave of their texts, in all KV cache groups, with those that begin alike.

    Without a configuration nothing is kept, and nothing found.
    """

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner, config: PrefixConfig | None):
        self.groups = groups
        self.pool = groups[0].pool
        self.planner = planner
        self.config = config
        self.layout = block_layout(groups, [g.windows for g in planner.spec.groups])
        self.kinds = load_kinds(groups, planner)
        B = self.layout.block_size
        self.ladder = CheckpointLadder(-(-planner.config.snapshot_interval // B) * B if config else 0, B)
        self.tree = RadixTree(self.pool, B, self.ladder)
        self.pool.uncache_callback = self.tree.evict_holders
        self.needs = lru_cache(maxsize=256)(self._find_needs)
        self.tiers: Tiers | None = None
        self.agreement: Agreement = Alone()
        self.returns = ReturnTimes()
        self.num_queried_tokens = 0  # of all texts that were looked up
        self.num_reused_tokens = 0

    @property
    def enabled(self) -> bool:
        """Whether finished texts stay cached for later requests."""
        return self.config is not None

    def set_offloader(self, offloader: Offloader) -> None:
        """Put tiers below the pool: what the tree evicts goes there. Raises ValueError where nothing is kept."""
        if not self.enabled:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing for a tier")
        self.tiers = Tiers(offloader, self.groups, self.layout, self.kinds)
        self.tree.on_evict = self.tiers.on_evicted
        self.tree.on_outgrown = self.tiers.on_outgrown

    def close_offloader(self) -> None:
        """Close the tiers, and clear the tree, whose hashes name the model of these tiers."""
        if self.tiers:
            self.tree.on_evict = None
            self.tree.on_outgrown = None
            self.tiers.offloader.close()
            self.tree.clear()
            self.tiers = None

    @property
    def offloader(self) -> Offloader | None:
        """What moves pages between the pool and stores."""
        return self.tiers.offloader if self.tiers else None

    def first_link(self, text: Text, policy: EvictionPolicy, model: bytes = b"") -> bytes:
        """Return what the hashes of a text begin with under the windows of a policy. The model is the tiers' own."""
        model = model or (self.tiers.offloader.model_fingerprint if self.tiers else b"")
        return text.first_link(self.needs(policy, 0).windows, model)

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, text: Text, demand: Demand) -> Start:
        """Return where a row of this text may begin. Counts as no use."""
        start = Start(text, demand)
        if not self.enabled:
            return start
        needs = self.needs(demand.policy, demand.seed)
        link = self.first_link(text, demand.policy)
        match = self.tree.match_prefix(link, text, len(text))
        start = self._start_with_pages(needs, match, start)
        for kind, key in needs.standing:
            for checkpoint, end in match.checkpoints(key.name):
                position = kind.reach(demand, checkpoint).last
                if start.position < position <= demand.max_length:
                    held = HeldCheckpoint(kind, key.name, checkpoint, end.node)
                    start = Start(text, demand, position, checkpoints=[held])
        return replace(start, further=self._find_further(needs, link, match, start)) if self.tiers else start

    def _find_needs(self, policy: EvictionPolicy, seed: int) -> Needs:
        """Return what all rows of a policy ask of the kinds of checkpoints."""
        demand = Demand(policy, seed)
        asked = [(kind, kind.keys(demand), kind.reach(demand, None)) for kind in self.kinds.values()]
        return Needs(
            windows=self.planner.windows(policy),
            completing=[x for x in asked if x[0].needs_pages and x[1]],
            standing=[(kind, key) for kind, keys, _ in asked for key in keys if not kind.needs_pages],
            required=frozenset(key.name for _, keys, _ in asked for key in keys if key.is_required),
            limit=min([ANYWHERE.last, *(reach.last for kind, keys, reach in asked if kind.needs_pages and not keys)]),
            adds_mass=bool(policy.score_key),
        )

    def _start_with_pages(self, needs: Needs, match: PrefixMatch, start: Start) -> Start:
        """Return where the pages of the text, and the checkpoints that complete them, let a row begin."""
        demand = start.demand
        limit = min(match.length, demand.max_length, needs.limit)
        found = [list(self._options(x, match, demand)) for x in needs.completing]
        lasts = sorted({min(limit, reach.last) for options in found for reach, _ in options} or {limit}, reverse=True)
        position = next((p for p in lasts if all(_choose(options, p) for options in found)), 0)
        chosen = [_choose(options, position) for options in found] if position else []
        B = self.layout.block_size
        num_whole = position // B
        branch_point = limit // B * B
        shared = match.pages[:, :num_whole]  # a budget copies them
        num_shared = 0 if demand.policy.has_budget else int(np.count_nonzero(self.pool.ref_counts[shared] > 1))
        return replace(
            start,
            position=position,
            blocks=match.pages[:, : -(-position // B)],
            shared_length=0 if needs.adds_mass else position,  # such queries write into the slots of their row alone
            nodes=[n for n in match.nodes if n.start_block * B < position],
            checkpoints=[held for x in chosen if x and (held := x[1])],
            branch_point=branch_point if branch_point > position and not needs.adds_mass else 0,
            num_shared_pages=num_shared,
        )

    def _options(self, asked: KindNeeds, match: PrefixMatch, demand: Demand) -> Iterator[Option]:
        """Yield where a row may begin without a checkpoint of a kind, and with each that is there."""
        kind, keys, without = asked
        yield without, None
        for key in keys:
            for checkpoint, end in match.checkpoints(key.name):
                first, last = kind.reach(demand, checkpoint)
                yield Reach(first, min(last, end.reach)), HeldCheckpoint(kind, key.name, checkpoint, end.node)

    def _find_further(self, needs: Needs, link: bytes, match: PrefixMatch, start: Start) -> Start | None:
        """Return where the stores would let a row begin, behind where the tree does."""
        assert self.tiers
        demand = start.demand
        hashes = start.text.block_hashes(link, self.layout.block_size, demand.max_length)
        best = self._find_spans(needs, hashes, match, start)
        after = max(start.position, best.position if best else 0)
        for kind, key in needs.standing:
            last = min(key.last, demand.max_length)
            if found := next(self.tiers.spans.find(key.name, start.text, link, last, after), None):
                after, place = found
                best = Start(start.text, demand, after, stored=[StoredCheckpoint(kind, key.name, place)])
        return best

    def _find_spans(self, needs: Needs, hashes: Sequence[bytes], match: PrefixMatch, start: Start) -> Start | None:
        """Return the last end of a block at which spans of pages and of the checkpoints let a row begin."""
        assert self.tiers
        demand = start.demand
        B = self.layout.block_size
        offloader = self.tiers.offloader
        if offloader.probe_config and demand.policy.has_budget:
            return None  # a policy must not score a selection of tokens
        limit = min(demand.max_length, needs.limit)
        num_full = int(np.count_nonzero(needs.windows == NO_WINDOW))
        num_matched = min(match.length // B, limit // B)
        ranges = offloader.find_spans(hashes[num_matched : limit // B]) if num_full else []
        end = num_matched + sum(r.end - r.begin for r in ranges) if num_full else limit // B
        for i in range(end, start.position // B, -1):
            stored = self._stored_at(needs, hashes[i - 1], i * B)
            if stored is not None:
                break
        else:
            return None
        ranges = offloader.find_spans(hashes[num_matched:i]) if num_full else []
        if offloader.probe_config and sum(len(p.span.keys) - p.end + p.begin for p in ranges) > EXTRA_TABLE_PAGES:
            return None
        blocks = match.pages[:, : min(num_matched, i)]
        if not blocks.size:
            blocks = np.zeros((self.layout.pages_per_block if num_full else 0, 0), np.int32)
        return Start(
            start.text,
            demand,
            i * B,
            blocks,
            shared_length=0 if needs.adds_mass else i * B,
            nodes=[n for n in match.nodes if n.start_block < blocks.shape[-1]],
            span_ranges=ranges,
            is_selective=bool(offloader.probe_config and ranges),
            stored=stored,
        )

    def _stored_at(self, needs: Needs, block_hash: bytes, position: int) -> list[StoredCheckpoint] | None:
        """Return the stored checkpoints that let a row begin at the end of a block; None where some are missing."""
        assert self.tiers
        found = []
        for kind, keys, (first, last) in needs.completing:
            if first <= position <= last:
                continue
            places = ((key.name, self.tiers.spans.find_at(key.name, block_hash)) for key in keys)
            usable = (StoredCheckpoint(kind, key, p) for key, p in places if p and p.span.resumes_from <= position)
            stored = next(usable, None)
            if stored is None:
                return None
            found.append(stored)
        return found

    # ---- attaching -----------------------------------------------------------------------------------------------

    def attach(self, row: CheckpointedRow, start: Start, was_preempted: bool = False) -> Begun:
        """Begin an empty row where `find` says; blocks in tiers are being read when this returns.

        A request that was preempted loads nothing selectively: that can take more pages than computing does.
        """
        if not self.enabled:
            return Begun()
        self.num_queried_tokens += len(start.text)
        seen = self._record_text(start.text, start.demand.policy)
        link = self.first_link(start.text, start.demand.policy)
        self.returns.come_back(start.text.block_hashes(link, self.layout.block_size), self.tree.pins.clock())
        begun: Begun | None = None
        further = start.further
        with self.pool.held(start.page_list):  # to make room for what stores have, they may be evicted
            wants = further is not None and not (was_preempted and further.is_selective)
            if self.agrees_to_load(start, wants and (self.agreement.rank > 0 or self._should_load(start))):
                assert further
                with self.pool.held(further.page_list):
                    begun = self._attach_further(row, further)
            begun = begun or (self._attach(row, start) if start.position else None) or Begun()
        self.num_reused_tokens += begun.position
        branch_point = start.branch_point if start.branch_point > begun.position else 0
        return replace(begun, branch_point=branch_point, seen=seen)

    def load_ahead(self, row: CheckpointedRow, start: Start) -> Begun:
        """Begin an empty row with what stores have of a text that a request will ask for.

        It is loaded also where computing is faster: nobody waits for it yet.
        """
        assert start.further
        with self.pool.held(start.page_list), self.pool.held(start.further.page_list):
            return self._attach_further(row, start.further) or Begun()

    def agrees_to_load(self, start: Start, wants: bool) -> bool:
        """Return whether this rank wants to load what stores have further, and all ranks have the same there."""
        if not self.tiers:
            return False
        further = start.further
        found = (further.position, further.blocks.shape[-1], [c.key for c in further.stored]) if further else ()
        return self.agreement.is_shared(found if wants else ()) and wants

    def _should_load(self, start: Start) -> bool:
        """Return whether loading what stores have takes less time than computing it."""
        assert self.tiers and start.further
        places = [*start.further.span_ranges, *(c.place for c in start.further.stored)]
        return self.tiers.offloader.should_load(places, start.further.position - start.position)

    def _attach_further(self, row: CheckpointedRow, start: Start) -> Begun | None:
        """Begin a row with what stores have. A checkpoint that stands in for pages is loaded into the tree first."""
        assert self.tiers
        standing = next((c for c in start.stored if not c.kind.needs_pages), None)
        if not standing:
            return self._attach(row, start)
        started_at = perf_counter()
        checkpoint = self.tiers.load(standing.kind, standing.place, start.demand, start.position, self.agreement)
        if checkpoint is None:
            return None
        link = self.first_link(start.text, start.demand.policy)
        with self.pool.owned() as owned:
            owned.append(checkpoint.page_list)
            new = {standing.key: checkpoint}
            required = self.needs(start.demand.policy, start.demand.seed).required
            node = self.tree.insert(link, start.text, start.position, None, new, required=required).node
        held = HeldCheckpoint(standing.kind, standing.key, node.checkpoints[standing.key], node)
        if standing.kind.reach(start.demand, held.checkpoint).last != start.position:
            return None  # the node had another of this key, which does not let this row go on
        begun = self._attach(row, replace(start, stored=(), checkpoints=[held]))
        if begun is None:
            return None
        name = standing.place.store.name
        self.tiers.offloader.num_loaded_tokens[name] += start.position
        num_bytes = {name: standing.place.span.size}
        return replace(begun, state_load=LoadStats(started_at, perf_counter(), start.position, num_bytes))

    def _attach(self, row: CheckpointedRow, start: Start) -> Begun | None:
        """Give an empty row what was found. None, and it has nothing, where the pool has too few pages."""
        position = start.position
        incoming = self.tiers.prepare(start.stored, start.demand, position) if self.tiers and start.stored else []
        if start.stored and not self.agreement.is_shared(incoming is not None):
            return None
        if incoming is None:
            return None
        num_own = self.num_loaded_pages(start)
        num_own += sum(c.kind.num_own_pages(row, position, c.checkpoint) for c in start.checkpoints)
        with self.pool.held(start.page_list):  # before ensure_free, which may evict them
            if not self.pool.ensure_free(num_own):
                return None
            jobs = attach_pages(self.groups, self.layout, row.index, start)
            due = []
            for c in start.checkpoints:
                if c.kind.due_at(position, c.checkpoint) > position:
                    due.append(c)
                else:
                    c.kind.attach(row, position, c.checkpoint)
            for kind, numbered, place in incoming:
                assert self.tiers
                for layer, further in self.tiers.attach(kind, numbered, place, row, position).items():
                    jobs.setdefault(layer, []).extend(further)
        self.tree.touch(start.nodes, [(c.node, c.key) for c in start.checkpoints])
        if not start.span_ranges and not start.stored:
            return Begun(position, due=due)
        return Begun(position, due=due, load=self._start_load(row.index, start, jobs), is_sparse=start.is_selective)

    def num_loaded_pages(self, start: Start) -> int:
        """Return how many pages a row takes from the pool for what it begins with, beside checkpoints in the tree."""
        num_stored = sum(sum(c.place.span.num_blocks) for c in start.stored)
        return num_own_pages(self.groups, self.layout, start) + num_stored

    def _start_load(self, row: int, start: Start, jobs: dict[int, list[ReadJob]]) -> LayerLoader:
        """Start to read blocks of spans into the row's pages: those of jobs, or of spans only the important ones."""
        assert self.tiers
        offloader = self.tiers.offloader
        B = self.layout.block_size
        places = [*start.span_ranges, *(c.place for c in start.stored)]
        num_tokens = start.position - start.blocks.shape[-1] * B
        time_limit = offloader.time_limit([place.store for place in places], max(num_tokens, B))
        load: LayerLoader
        if start.is_selective:
            load = start_selective_load(self.groups[0], offloader, row, start, jobs, time_limit)
        else:
            load = LayerLoader(offloader, jobs, time_limit)
        load.num_tokens = offloader.record_load(places, num_tokens)
        return load

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Tell the cost model how long a step took that waited for no load."""
        if self.tiers and num_tokens >= self.layout.block_size:
            self.tiers.offloader.cost_model.record_compute(num_tokens, seconds)

    # ---- storing -------------------------------------------------------------------------------------------------

    def store(self, row: CheckpointedRow, text: Text, moment: Moment, begun_at: int = 0) -> int:
        """Keep what a row leaves of a text at a moment: pages of whole blocks while it runs, and checkpoints.

        The request first began with `begun_at` cached tokens. Returns the number of tokens whose pages are kept.
        """
        if not self.config:
            return 0
        B = self.layout.block_size
        keeps_answer = self.config.keep == "all" and not row.demand.policy.looks  # a prompt attends to everything
        end = moment.position if keeps_answer else min(moment.position, row.prompt_len)
        end = end // B * B if moment.is_running else end
        moment = replace(moment, position=end, has_pages=moment.has_pages and end > 0)
        captured = row.unstored.copy()
        row.unstored.clear()
        required = set(self.needs(row.demand.policy, row.demand.seed).required)
        link = self.first_link(text, row.demand.policy)
        try:
            for kind in self.kinds.values():
                captured |= (found := kind.capture(row, moment))
                required -= found.keys()
            has_pages = moment.has_pages and not required
            for key in [k for k, c in captured.items() if not c.needs_pages]:
                self._store_checkpoint(link, row, text, key, captured, begun_at)
            if has_pages:
                self._store_pages(link, row, text, end)
                for key in list(captured):
                    self._store_checkpoint(link, row, text, key, captured, begun_at)
        finally:
            self.pool.free(np.concatenate([NO_PAGES, *(c.page_list for c in captured.values())]))
            row.unstored = {key: c for key, c in captured.items() if not len(c.page_list)}
        return end if has_pages else 0

    def _store_checkpoint(
        self,
        link: bytes,
        row: CheckpointedRow,
        text: Text,
        key: bytes,
        captured: dict[bytes, TextCheckpoint],
        begun_at: int,
    ) -> None:
        """Keep one of the checkpoints, which the tree takes over."""
        checkpoint = captured[key]
        required = self.needs(row.demand.policy, row.demand.seed).required
        self.tree.insert(link, text, checkpoint.position, None, {key: checkpoint}, begun_at, required)
        del captured[key]
        if self.tiers:
            self.tiers.on_captured(link, text, key, checkpoint)

    def _store_pages(self, link: bytes, row: CheckpointedRow, text: Text, end: int) -> None:
        """Keep the pages of the first `end` tokens of a text."""
        pages = self.layout.blocks_of(self.groups, row.index, end)
        needs = self.needs(row.demand.policy, row.demand.seed)
        stored = self.tree.insert(link, text, end, pages, required=needs.required).stored
        if stored and self.tree.observer and np.array_equal(needs.windows, self.planner.model_windows):
            self.tree.observer.on_stored(stored, text.group)
        self._write_through(link, text, end, pages)

    def store_again(self, link: bytes, text: Text) -> None:
        """Put what the tree has of a text into the stores that keep what is computed, where they lack it."""
        match = self.tree.match_prefix(link, text, len(text))
        self._write_through(link, text, match.length, match.pages)

    def _write_through(self, link: bytes, text: Text, end: int, pages: Ints) -> None:
        """Put the whole blocks of the first `end` tokens into the stores that keep what is computed."""
        if self.tiers:
            hashes = text.block_hashes(link, self.layout.block_size, end)
            self.tiers.offloader.on_computed(hashes, 0, pages[:, : len(hashes)], salt_digest(text.salt))

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Let pins expire by a clock, in seconds, that all ranks have."""
        self.tree.pins.clock = clock

    def set_agreement(self, agreement: Agreement) -> None:
        """Ask other ranks before something is loaded."""
        self.agreement = agreement

    def expire_pins(self) -> None:
        """Drop the pins whose time is over."""
        self.tree.pins.expire()

    # ---- statistics and the accountant ---------------------------------------------------------------------------

    def hits_by_source(self) -> dict[str, int]:
        """Return tokens that requests began with, by where they were: the pool, or a store."""
        loaded = dict(self.offloader.num_loaded_tokens) if self.offloader else {}
        return {"pool": self.num_reused_tokens - sum(loaded.values()), **loaded}

    def tier_stats(self) -> list[dict[str, Any]]:
        """Return the statistics of every tier."""
        return self.offloader.stats() if self.offloader else []

    def checkpoint_stats(self) -> tuple[int, int]:
        """Return the number of checkpoints, and of the pages that they hold; shared ones count once."""
        held = [c.page_list for node in self.tree.iter_nodes() for c in node.checkpoints.values()]
        return len(held), len(np.unique(np.concatenate(held))) if held else 0

    def set_observer(self, observer: PrefixObserver) -> None:
        """Tell an observer from now on which pages requests may begin with. Raises ValueError where nothing is kept."""
        if not self.enabled:
            raise ValueError("prefix_cache=off keeps nothing: there are no events for --kv-events")
        self.tree.observer = observer

    def take_evictions(self) -> list[EvictionRecord]:
        """Return what the tree evicted since the last call, or the latest of it."""
        found = list(self.tree.evictions)
        self.tree.evictions.clear()
        return found

    # ---- history -------------------------------------------------------------------------------------------------

    def keep_history(self) -> PrefixHistory:
        """Return the history of texts and evictions, which begins at the first call."""
        self.tree.history = self.tree.history or PrefixHistory()
        return self.tree.history

    def _record_text(self, text: Text, policy: EvictionPolicy) -> SeenText | None:
        """Remember a text that a row begins to compute, where there is a history."""
        if not self.tree.history:
            return None
        link = self.first_link(text, policy)
        seen = SeenText(link, text.group, policy, text.tokens.copy(), text.keying, is_running=True)
        self.tree.history.add(seen)
        return seen


def _choose(options: Sequence[Option], position: int) -> Option | None:
    """Return the first of one kind's options with which a row may begin at a position."""
    return next((x for x in options if x[0].first <= position <= x[0].last), None)
