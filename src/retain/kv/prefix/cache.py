"""The prefix cache: rows begin with pages that the radix tree or a tier has, and leave their own pages to it.

A row with a budget does so, too, until it first evicts: from then on its pages hold a selection of tokens. Keys and
values depend on how far layers see, so the windows are part of the root hash, like the tenant's salt and the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from time import perf_counter
from typing import Any

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evicted_state import EvictedState
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.prompt_masses import PromptMasses
from retain.kv.memory.block_layout import block_layout
from retain.kv.memory.block_tables import EXTRA_TABLE_PAGES, BlockTables
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.prefix.attach import AttachPlan, attach_pages
from retain.kv.prefix.config import PrefixConfig
from retain.kv.prefix.events import PrefixObserver
from retain.kv.prefix.history import PrefixHistory, SeenText
from retain.kv.prefix.node import EvictionRecord, Node, PrefixMatch
from retain.kv.prefix.query import PrefixEntry, PrefixQuery
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.prefix.resuming import can_go_on, capture_evicted_state, copy_evicted_state, state_root
from retain.kv.prefix.snapshot_ladder import SnapshotLadder
from retain.kv.prefix.state_tiers import FoundState, StateTiers
from retain.kv.prefix.windows import capture_sliding_windows
from retain.kv.stats.request import LoadStats
from retain.kv.stores.loader import LayerLoader
from retain.kv.stores.manager import Offloader
from retain.kv.stores.selective.loader import SelectiveLoader
from retain.kv.stores.store import ReadJob, SpanRange
from retain.types import Ints


@dataclass(frozen=True)
class FoundPrefix:
    """What a row was given: `length` computed tokens, and a position where more texts could branch off (0: nowhere).

    `load` is still reading them; `is_sparse` where it reads only the important ones. `text` is the row's in the
    history. `masses` are those of the tokens, and maybe of a few more. `state_load` has read a state.
    """

    length: int = 0
    branch_point: int = 0
    load: LayerLoader | None = None
    is_sparse: bool = False
    text: SeenText | None = None
    masses: PromptMasses | None = None
    state_load: LoadStats | None = None


class PrefixCache:
    """Share the pages of the tables of all KV cache groups between texts that begin alike."""

    enabled = True

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner, config: PrefixConfig):
        self.groups = groups
        self.pool = groups[0].pool
        self.planner = planner
        self.config = config
        self.layout = block_layout(groups, [g.windows for g in planner.spec.groups])
        self._page_sizes = [t.page_size for t in groups]
        B = self.layout.block_size
        self.ladder = SnapshotLadder(-(-planner.config.snapshot_interval // B) * B)
        self.tree = RadixTree(self.pool, B, self.ladder)
        self.pool.uncache_callback = self.tree.evict_holders
        self.offloader: Offloader | None = None
        self.state_tiers: StateTiers | None = None
        self._loaded_state: tuple[EvictedState, LoadStats] | None = None  # the last one, until a row goes on from it
        self.selective_loader: type[SelectiveLoader] = SelectiveLoader
        self.num_queried_tokens = 0  # of all texts that were looked up
        self.num_reused_tokens = 0

    def set_offloader(self, offloader: Offloader, selective_loader: type[SelectiveLoader] = SelectiveLoader) -> None:
        """Put tiers below the pool: what the tree evicts goes there."""
        self.offloader = offloader
        self.selective_loader = selective_loader
        self.state_tiers = StateTiers(offloader, self.groups, self.planner)
        self.tree.on_evict = self._offload_evicted
        self.tree.on_outgrown = self.state_tiers.on_outgrown

    def _offload_evicted(self, node: Node, num_kept_pages: int) -> None:
        """Offload what a leaf loses. Of less than a page, only the windows are kept, as they are where it begins."""
        assert self.offloader and self.state_tiers and node.parent
        if isinstance(node.snapshot, EvictedState):
            self.state_tiers.on_evicted(node, node.snapshot)
        if isinstance(node.snapshot, EvictedState | PromptMasses) or not len(node.pages) + bool(node.snapshot):
            return  # tiers have no masses
        B = self.layout.block_size
        windows = node.snapshot if isinstance(node.snapshot, SlidingWindows) else None
        if len(node.tokens) == len(node.block_hashes) * B:
            n = min(num_kept_pages, len(node.block_hashes) - 1)  # the last key names the windows
            begin = num_kept_pages
            self.offloader.on_evicted(node.block_hashes[n:], node.start_page + n, node.pages[..., begin:], windows)
        elif windows and node.start_page:
            windows = windows.before(node.start_page * B, self._page_sizes)
            self.offloader.on_evicted(node.parent.block_hashes[-1:], node.start_page - 1, node.pages[..., :0], windows)

    def close_offloader(self) -> None:
        """Close the tiers, and clear the tree, whose hashes name the model of these tiers."""
        if self.offloader:
            self.tree.on_evict = None
            self.tree.on_outgrown = None
            self.offloader.close()
            self.tree.clear()
            self.offloader = None
            self.state_tiers = None
            self._loaded_state = None

    # ---- matching ------------------------------------------------------------------------------------------------

    def match_prefix(self, query: PrefixQuery, max_length: int = 0) -> PrefixMatch | None:
        """Return what the tree has of a text, or None. Counts as a use of the nodes that match.

        It has at most the tokens that the policy may skip, or `max_length` where that is more.
        """
        windows = self.planner.windows(query.policy)
        slides = bool((windows < NO_WINDOW).any())
        root = self.root_hash(query.salt, windows)
        return self.tree.match_prefix(root, query.tokens, max(query.max_skipped_tokens, max_length), slides)

    def num_shared_pages(self, query: PrefixQuery) -> int:
        """Return how many pages of the text are in the tables of other rows already."""
        match = None if query.policy.has_budget else self.match_prefix(query)
        if not match:
            return 0
        shared = match.pages[..., : match.length // self.layout.block_size]
        return int(np.count_nonzero(self.pool.ref_counts[shared] > 1))

    def pin(self, policy: EvictionPolicy, tokens: Sequence[int], salt: str, seconds: float, owner: str = "") -> int:
        """Keep what the tree has of a text for `seconds`, as far as pins have room. Returns the number of tokens."""
        return self.tree.pin(self.root_hash(salt, self.planner.windows(policy)), tokens, seconds, owner)

    def unpin_all(self) -> bool:
        """Drop all pins. Returns whether there were any."""
        return self.tree.unpin_all()

    @property
    def num_evictable_pages(self) -> int:
        """Pages that the tree would free for a request."""
        return self.tree.num_evictable_pages

    @property
    def pages(self) -> Ints:
        """Pages that the tree holds, for the accountant."""
        return self.tree.all_pages

    # ---- attaching -----------------------------------------------------------------------------------------------

    def attach(self, row: int, query: PrefixQuery, was_preempted: bool = False) -> FoundPrefix:
        """Begin an empty row with cached pages; blocks in tiers are being read when this returns.

        A request that was preempted loads nothing selectively: that can take more pages than computing does. Where the
        row stores its windows at the branch point, more texts can branch off.
        """
        S = self.layout.block_size
        must_copy = bool(query.policy.score_key)  # queries add mass to the slots of this row alone
        text = self.record_text(query)
        self.num_queried_tokens += len(query.tokens)
        match, masses = self._match_scored(query)
        selective = self.offloader is not None and self.offloader.probe_config is not None
        plan = None if (was_preempted and selective) or masses else self._plan_load(query, match)
        if match and not plan:
            windows = match.snapshot if isinstance(match.snapshot, SlidingWindows) else None
            plan = AttachPlan(match.length, match.pages[..., : -(-match.length // S)], windows)
        length = plan.length if plan else 0
        branch_point = match.common_length // S * S if match and not must_copy else 0  # such a row stores nothing there
        branch_point = branch_point if branch_point > length else 0
        jobs = attach_pages(self.groups, self.layout, row, plan, must_copy) if plan and length else None
        if plan is None or jobs is None:
            return FoundPrefix(branch_point=branch_point, text=text)
        load: LayerLoader | None = None
        if self.offloader and (plan.span_ranges or plan.offloaded_windows):
            start_load = self._start_selective_load if plan.selective else self._start_load
            load = start_load(self.offloader, row, plan, jobs)
            load.num_tokens = self.offloader.record_load(plan.span_ranges, plan.offloaded_windows)
        self.num_reused_tokens += length
        return FoundPrefix(length, branch_point, load, load is not None and plan.selective, text, masses)

    def record_text(self, query: PrefixQuery) -> SeenText | None:
        """Remember a text that a row begins to compute, where there is a history."""
        if not self.tree.history:
            return None
        root = self.root_hash(query.salt, self.planner.windows(query.policy))
        text = SeenText(root, query.salt, query.policy, np.asarray(query.tokens, np.int32), is_running=True)
        self.tree.history.add(text)
        return text

    def _plan_load(self, query: PrefixQuery, match: PrefixMatch | None) -> AttachPlan | None:
        """Return a plan of whole pages that continues the match from tiers, where reading is faster than computing."""
        S = self.layout.block_size
        windows = self.planner.windows(query.policy)
        offloader = self.offloader
        if not offloader or (offloader.probe_config and query.policy.has_budget):
            return None  # a policy must not score a selection of tokens
        tokens = np.asarray(query.tokens[: max(query.max_skipped_tokens, 0)], np.int32)
        keys = self.tree.hash_blocks(self.root_hash(query.salt, windows), tokens)
        num_matched, length = (match.common_length // S, match.length) if match else (0, 0)
        num_full = int(np.count_nonzero(windows == NO_WINDOW))
        ranges = offloader.find_spans(keys[num_matched:]) if num_full else []
        end_page = num_matched + sum(p.end - p.begin for p in ranges) if num_full else len(keys)
        found: SpanRange | None = None
        if num_full < len(windows):
            candidates = ((i, offloader.find_windows(keys[i - 1])) for i in range(end_page, length // S, -1))
            usable = ((i, w) for i, w in candidates if w and w.span.resumes_from <= i * S)
            end_page, found = next(usable, (0, None))
            ranges = offloader.find_spans(keys[num_matched:end_page]) if num_full else []
        if end_page * S <= length:
            return None
        if offloader.probe_config and sum(len(p.span.keys) - p.end + p.begin for p in ranges) > EXTRA_TABLE_PAGES:
            return None
        if not offloader.should_load([*ranges, found] if found else ranges, end_page * S - length):
            return None
        blocks = np.zeros((self.layout.pages_per_block if num_full else 0, 0), np.int32)
        if match:
            blocks = match.pages[..., : min(num_matched, end_page)]
        selective = bool(offloader.probe_config and ranges)
        return AttachPlan(end_page * S, blocks, None, ranges, found, selective)

    def _start_load(
        self, offloader: Offloader, row: int, plan: AttachPlan, jobs: dict[int, list[ReadJob]]
    ) -> LayerLoader:
        return LayerLoader(offloader, jobs, self._time_limit(offloader, plan))

    def _time_limit(self, offloader: Offloader, plan: AttachPlan) -> float:
        """Return the seconds that a load may take."""
        ranges = [*plan.span_ranges, *([plan.offloaded_windows] if plan.offloaded_windows else [])]
        B = self.layout.block_size
        num_tokens = plan.length - plan.blocks.shape[-1] * B
        return offloader.time_limit([r.store for r in ranges], max(num_tokens, B))

    def _start_selective_load(
        self, offloader: Offloader, row: int, plan: AttachPlan, jobs: dict[int, list[ReadJob]]
    ) -> LayerLoader:
        """Start to load the important blocks only; afterwards the row's tables are shorter than its text."""
        (t,) = self.groups  # others are refused
        S = t.page_size
        first = plan.blocks.shape[-1]
        assert offloader.probe_config
        layers = t.full_layers(row)
        end = first + sum(len(p.span.keys) for p in plan.span_ranges)
        t.ring_base[row, layers] = plan.length - end * S
        t.mark_dirty(row, dense=False)

        def trim(layer: int, n: int) -> None:
            t.remove_pages(row, layer, first + n, end)

        return self.selective_loader(
            offloader=offloader,
            probe_config=offloader.probe_config,
            ranges=plan.span_ranges,
            layers=layers.tolist(),
            pages=t.pages[row, layers, :, first:end].copy(),
            trim_pages=trim,
            other_jobs=jobs,
            time_limit=self._time_limit(offloader, plan),
        )

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Tell the cost model how long a step took that waited for no load."""
        if self.offloader and num_tokens >= self.layout.block_size:
            self.offloader.cost_model.record_compute(num_tokens, seconds)

    # ---- storing -------------------------------------------------------------------------------------------------

    def store(
        self, row: int, entry: PrefixEntry, still_running: bool = False, seen_text: SeenText | None = None
    ) -> None:
        """Keep the pages of a text that a row has computed. A row that is still running shares only whole blocks.

        `seen_text` is the row's in the history.
        """
        B = self.layout.block_size
        n = entry.length
        end = n if self.config.keep == "all" else min(n, entry.prompt_len)
        end = end // B * B if still_running else end
        if not end:
            return
        slides = any(len(t.ring_layers(row)) for t in self.groups)
        pages = self.layout.blocks_of(self.groups, row, end)
        visible = self.planner.windows(entry.policy)
        root = self.root_hash(entry.salt, visible)
        windows = capture_sliding_windows(self.groups, row, end) if slides else None
        if slides and not windows:
            return
        for t in self.groups if windows and still_running else ():
            t.note_shared_rings(row, len(entry.tokens))
        text = np.asarray(entry.tokens[:end], np.int32)
        try:
            self._offload_computed(self.tree.hash_blocks(root, text), pages, windows)
        except BaseException:
            self.pool.free(windows.page_list if windows else pages[:0].ravel())
            raise
        stored = self.tree.insert(root, entry.tokens[:end], pages, windows, entry.begun_at)
        if stored and self.tree.observer and np.array_equal(visible, self.planner.model_windows):
            self.tree.observer.on_stored(stored, entry.salt)
        if self.tree.history and seen_text:
            self.tree.history.store(seen_text, entry.tokens, end)

    def _offload_computed(self, keys: Sequence[bytes], pages: Ints, windows: SlidingWindows | None) -> None:
        """Put the whole blocks of a text, and its windows at their end, into the tiers that keep what is computed."""
        if self.offloader:
            B = self.layout.block_size
            stored_windows = windows.before(len(keys) * B, self._page_sizes) if windows and keys else None
            self.offloader.on_computed(keys, 0, pages[..., : len(keys)], stored_windows)

    # ---- masses --------------------------------------------------------------------------------------------------

    def find_masses(self, query: PrefixQuery) -> PromptMasses | None:
        """Return the masses of the longest beginning of a text that the same queries gave to its tokens."""
        policy = query.policy
        if not isinstance(policy, BudgetPolicy) or not policy.score_key or policy.prefill != "exact":
            return None
        root = self._masses_root(policy, query.salt, query.seed)
        match = self.tree.match_prefix(root, query.tokens, policy.prompt_len, needs_snapshot=True)
        found = match.snapshot if match else None
        if isinstance(found, PromptMasses) and policy.weighs_alike(found.policy, found.position):
            return found
        return None

    def _match_scored(self, query: PrefixQuery) -> tuple[PrefixMatch | None, PromptMasses | None]:
        """Return what the tree has of a text, and the masses without which the policy could skip less of it."""
        masses = self.find_masses(query)
        if masses:
            assert isinstance(query.policy, BudgetPolicy)
            # At least one token of the prompt is computed, for logits.
            length = min(masses.position, query.max_length, query.policy.prompt_len - 1)
            match = self.match_prefix(query, length)
            if match and match.length > query.max_skipped_tokens:
                return match, masses
        return self.match_prefix(query), None

    def store_masses(self, entry: PrefixEntry, masses: PromptMasses) -> None:
        """Keep the masses of the first tokens of a text whose pages were stored."""
        text_root = self.root_hash(entry.salt, self.planner.windows(entry.policy))
        if text_root not in self.tree.roots:
            return
        text = entry.tokens[: masses.position]
        pages = self.tree.pages_of(text_root, text)
        self.pool.incref(pages.ravel())
        root = self._masses_root(entry.policy, entry.salt, entry.seed)
        no_pages = np.zeros((0, -(-masses.position // self.layout.block_size)), np.int32)
        self.tree.insert(root, text, no_pages, replace(masses, page_list=pages.ravel()), entry.begun_at)

    def _masses_root(self, policy: EvictionPolicy, salt: str, seed: int) -> bytes:
        """Hash all that masses depend on, beside the text."""
        key = f"masses {policy.score_key!r} {seed if policy.uses_noise else 0}"
        return blake2b(self.root_hash(salt, self.planner.windows(policy)) + key.encode(), digest_size=16).digest()

    # ---- evicted states ------------------------------------------------------------------------------------------

    def find_state(self, query: PrefixQuery) -> EvictedState | None:
        """Return the latest state that an earlier row of the text left under the same policy, if there is one.

        None where the pages of the text itself, which nothing was evicted from, reach as far.
        """
        state = self._match_states(query)
        pages = self._match_scored(query)[0] if state or self.state_tiers else None
        length = pages.length if pages else 0
        if found := self.find_offloaded_state(query, max(length, state.position if state else 0)):
            self._load_state(query, *found)
            state = self._match_states(query)  # to make room for the other, this one may have been evicted
        return state if state and length < state.position else None

    def _match_states(self, query: PrefixQuery) -> EvictedState | None:
        """Return the latest state of the text that is in the tree."""
        found = [self._match_state(query, in_prompt) for in_prompt in (False, True)]
        return max((s for s in found if s), key=lambda s: s.position, default=None)

    def _match_state(self, query: PrefixQuery, in_prompt: bool) -> EvictedState | None:
        policy = query.policy
        if not (policy.streamed_key if in_prompt else policy.resume_key):
            return None
        root = self._state_root(query, in_prompt)
        match = self.tree.match_prefix(root, query.tokens, query.max_length, needs_snapshot=True)
        state = match.snapshot if match else None
        if not isinstance(state, EvictedState) or not isinstance(policy, BudgetPolicy):
            return None
        return state if can_go_on(state, policy) else None

    def _state_root(self, of: PrefixQuery | PrefixEntry, in_prompt: bool) -> bytes:
        root = self.root_hash(of.salt, self.planner.windows(of.policy))
        return state_root(root, of.policy, of.seed, in_prompt)

    def state_roots(self, query: PrefixQuery) -> list[tuple[bytes, int]]:
        """Return the root hashes of states that the text may go on from, and the most tokens of it that they have."""
        policy = query.policy
        found = [(self._state_root(query, False), query.max_length)] if policy.resume_key else []
        if policy.streamed_key and isinstance(policy, BudgetPolicy):
            found.append((self._state_root(query, True), min(query.max_length, policy.prompt_len - 1)))
        return found

    def find_offloaded_state(self, query: PrefixQuery, after: int) -> tuple[FoundState, bytes] | None:
        """Return the latest state of the text in the tiers, after more than `after` tokens, and its root hash."""
        found = []
        for root, max_length in self.state_roots(query) if self.state_tiers else ():
            tokens = np.asarray(query.tokens[:max_length], np.int32)
            state = self.state_tiers and self.state_tiers.find(self.tree.hash_blocks(root, tokens), tokens, after)
            found += [(state, root)] if state else []
        return max(found, key=lambda x: x[0].position, default=None)

    def _load_state(self, query: PrefixQuery, found: FoundState, root: bytes) -> None:
        """Bring a state from the tiers into the tree, below this root hash, if that is possible and saves time."""
        policy = query.policy
        if not self.state_tiers or not isinstance(policy, BudgetPolicy):
            return
        started_at = perf_counter()
        state = self.state_tiers.load(found, policy)
        if state:
            self._insert_state(root, query.tokens[: state.position], state)
            num_bytes = {found.span.store.name: found.span.span.size}
            self._loaded_state = state, LoadStats(started_at, perf_counter(), state.position, num_bytes)

    def _insert_state(self, root: bytes, tokens: Sequence[int], state: EvictedState, begun_at: int = 0) -> None:
        no_pages = np.zeros((0, -(-len(tokens) // self.layout.block_size)), np.int32)
        self.tree.insert(root, tokens, no_pages, state, begun_at)

    def record_resumed(self, query: PrefixQuery, state: EvictedState) -> LoadStats | None:
        """Count the tokens of a state that a row goes on from. Returns its load, where it was loaded for that."""
        self.num_queried_tokens += len(query.tokens)
        self.num_reused_tokens += state.position
        if not self.offloader or not self._loaded_state or self._loaded_state[0] is not state:
            return None
        load = self._loaded_state[1]
        self._loaded_state = None
        for name in load.bytes_by_tier:
            self.offloader.num_loaded_tokens[name] += state.position
        return load

    def store_state(self, entry: PrefixEntry, evictors: Sequence[BudgetEvictor], in_prompt: bool = False) -> None:
        """Keep the state of a row that ends, for texts that go on from there; or one inside a prompt."""
        if not entry.policy.resume_key or self.config.keep != "all":
            return
        n = len(entry.tokens)
        capture = copy_evicted_state if in_prompt else capture_evicted_state
        state = capture(self.groups, evictors, n)
        if state is None:
            return
        root = self._state_root(entry, in_prompt)
        try:
            if self.state_tiers:
                tokens = np.asarray(entry.tokens, np.int32)
                self.state_tiers.on_stored(self.tree.hash_blocks(root, tokens), tokens, state)
        except BaseException:
            self.pool.free(state.page_list)
            raise
        self._insert_state(root, entry.tokens, state, entry.begun_at)

    # ---- statistics ----------------------------------------------------------------------------------------------

    def hits_by_source(self) -> dict[str, int]:
        """Return tokens that requests began with, by where they were: the pool, or a store."""
        loaded = dict(self.offloader.num_loaded_tokens) if self.offloader else {}
        return {"pool": self.num_reused_tokens - sum(loaded.values()), **loaded}

    def tier_stats(self) -> list[dict[str, Any]]:
        """Return the statistics of every tier."""
        return self.offloader.stats() if self.offloader else []

    @property
    def num_holders(self) -> Ints:
        """How many nodes and snapshots of the tree hold each page, [P]."""
        return self.tree.num_holders

    def snapshot_stats(self) -> tuple[int, int]:
        """Return the number of snapshots, and of the pages that they hold; shared ones count once."""
        held = [node.snapshot.page_list for node in self.tree.iter_nodes() if node.snapshot]
        return len(held), len(np.unique(np.concatenate(held))) if held else 0

    def keep_history(self) -> PrefixHistory:
        """Return the history of texts and evictions, which begins at the first call."""
        self.tree.history = self.tree.history or PrefixHistory()
        return self.tree.history

    def set_observer(self, observer: PrefixObserver) -> None:
        """Tell an observer from now on which pages requests may begin with."""
        self.tree.observer = observer

    def take_evictions(self) -> list[EvictionRecord]:
        """Return what the tree evicted since the last call, or the latest of it."""
        found = list(self.tree.evictions)
        self.tree.evictions.clear()
        return found

    def root_hash(self, salt: str, windows: Ints, model: bytes = b"") -> bytes:
        """Hash what every text of this tenant, these windows and this model (default: the tiers' own) begins with."""
        model = model or (self.offloader.model_fingerprint if self.offloader else b"")
        text = model + b"\0" + salt.encode(errors="surrogatepass") + b"\0" + windows.tobytes()
        return blake2b(text, digest_size=16).digest()
