"""Rows that begin with what the prefix tree has, and leave to it what they computed.

Whole pages are shared, a page of which only a part is wanted is copied, and so is what will be written over: the
windows of sliding layers, and everything of a row that forgets. Such a row leaves nothing, for its pages soon hold a
choice of tokens. Keys and values depend on how far layers see, so that is part of the first link. What is not known
here: who is scheduled, how the tree finds and evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import NO_WINDOW
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.policies import Policy
from retain.kv.offload.loader import LayerLoader, ReadJob
from retain.kv.offload.manager import Offloader
from retain.kv.offload.selective.loader import SelectiveLoader
from retain.kv.prefix.attach import EXTRA_TABLE_PAGES, AttachPlan, attach_pages, remove_pages
from retain.kv.prefix.node import PrefixMatch, SlidingWindows
from retain.kv.prefix.radix_tree import RadixTree
from retain.plugins import check_choice, from_strings, parse_spec

if TYPE_CHECKING:
    from retain.kv.memory.cache import Cache

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PrefixConfig:
    """What is kept of a request. Raises ValueError."""

    keep: str = "all"  # or prompt: no answers

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, "all", "prompt")


@dataclass(frozen=True)
class SelectiveConfig(PrefixConfig):
    """Of what comes from tiers only so much is loaded, what is looked at most. Raises ValueError."""

    ratio: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"selective: ratio is above 0 and at most 1, not {self.ratio:g}")


def parse_prefix_config(spec: str) -> PrefixConfig | None:
    """`exact`, `exact:keep=prompt`, `selective:ratio=0.25`, or `off`, which is None. Raises ValueError."""
    name, given = parse_spec(spec)
    if name == "off" and not given:
        return None
    if name not in ("exact", "selective"):
        raise ValueError(f"unknown prefix {spec!r}: choose exact, exact:keep=prompt, selective:ratio=0.25 or off")
    found: PrefixConfig = from_strings(SelectiveConfig if name == "selective" else PrefixConfig, name, given)
    return found


class PrefixCache:
    """Of one cache. `salt` is a tenant's: texts of different salts never meet."""

    def __init__(self, cache: Cache, config: PrefixConfig):
        self.cache, self.config, self.tree = cache, config, RadixTree(cache.pool, cache.page_size)
        self.offloader: Offloader | None = None
        self.loads: dict[int, LayerLoader] = {}  # of rows that wait for pages
        self.sparse_rows = set[int]()  # rows that were born evicted: they leave nothing
        self.selective_loader_class: type[SelectiveLoader] = SelectiveLoader
        self.num_reused_tokens = 0  # tokens that rows began with

    def _root_hash(self, salt: str, windows: Ints) -> bytes:
        """What the first link of a text begins with."""
        brand = self.offloader.model_fingerprint if self.offloader else b""
        text = brand + b"\0" + salt.encode(errors="surrogatepass") + b"\0" + windows.tobytes()
        return blake2b(text, digest_size=16).digest()

    def set_offloader(self, offloader: Offloader) -> None:
        """From now on there are tiers below the pool."""
        self.offloader = offloader
        self.tree.on_evict = lambda node, n: offloader.on_evicted(
            node.block_hashes[n:], node.start_page + n, node.pages[..., n:], node.sliding_windows
        )

    def close_offloader(self) -> None:
        """There are no tiers any more; and nothing is in the tree, whose links named them."""
        if self.offloader:
            self.tree.on_evict = None
            self.offloader.close()
            self.tree.clear()
            self.offloader = None

    def match_prefix(self, policy: Policy, tokens: Sequence[int], max_length: int, salt: str) -> PrefixMatch | None:
        """What a row under this policy could begin with: at most `limit` tokens."""
        if isinstance(policy, BudgetPolicy):
            max_length = min(max_length, _max_skippable_tokens(policy))
        windows = self.cache.windows(policy)
        return self.tree.match_prefix(
            self._root_hash(salt, windows), tokens, max_length, bool((windows < NO_WINDOW).any())
        )

    def pin(self, policy: Policy, tokens: Sequence[int], salt: str, seconds: float) -> int:
        """What there is of a text stays for so long. How many tokens that is."""
        return self.tree.pin(self._root_hash(salt, self.cache.windows(policy)), tokens, seconds)

    def num_shared_pages(self, policy: Policy, tokens: Sequence[int], max_length: int, salt: str) -> int:
        """Pages of what such a row would need that other rows hold already."""
        hit = None if isinstance(policy, BudgetPolicy) else self.match_prefix(policy, tokens, max_length, salt)
        if not hit:
            return 0
        shared = hit.pages[..., : hit.length // self.cache.page_size]
        return int(np.count_nonzero(self.cache.pool.ref_counts[shared] > 1))

    def attach_prefix(
        self, row: int, policy: Policy, tokens: Sequence[int], max_length: int, salt: str, was_preempted: bool = False
    ) -> tuple[int, int]:
        """Begin a row that owns nothing yet. How many tokens are computed; and where more could have been shared, had
        somebody left the windows of its sliding layers there (0: nowhere).

        What sleeps in tiers is on its way when this returns: see `awaited`. Who begins `again`, having been preempted,
        chooses nothing: it could take more pages than computing would, and has to fit.
        """
        S, copies = self.cache.page_size, isinstance(policy, BudgetPolicy)
        hit = self.match_prefix(policy, tokens, max_length, salt)
        chooses = self.offloader is not None and self.offloader.probe_config is not None
        begin = None if was_preempted and chooses else self._plan_offload_load(policy, tokens, max_length, salt, hit)
        if hit and not begin:
            begin = AttachPlan(hit.length, hit.pages[..., : -(-hit.length // S)], hit.sliding_windows)
        length = begin.length if begin else 0
        mark = hit.common_length // S * S if hit and not copies else 0  # who copies leaves nothing
        mark = mark if mark > length else 0
        jobs = attach_pages(self.cache, row, begin, copies) if begin and length else None
        if jobs is not None and self.offloader and begin and (begin.span_ranges or begin.offloaded_windows):
            self.loads[row] = (
                self._start_selective_load(row, begin, jobs) if begin.selective else LayerLoader(self.offloader, jobs)
            )
            self.offloader.record_load(begin.span_ranges, begin.offloaded_windows)
        self.num_reused_tokens += 0 if jobs is None else length
        return (0 if jobs is None else length), mark

    def _plan_offload_load(
        self, policy: Policy, tokens: Sequence[int], max_length: int, salt: str, hit: PrefixMatch | None
    ) -> AttachPlan | None:
        """A beginning of whole pages that is longer than what the tree has, where tiers have the rest of it, and it is
        sooner read than computed.
        """
        S, windows = self.cache.page_size, self.cache.windows(policy)
        if not self.offloader or (self.offloader.probe_config and isinstance(policy, BudgetPolicy)):
            return None  # who forgets would choose among what was chosen
        if isinstance(policy, BudgetPolicy):
            max_length = min(max_length, _max_skippable_tokens(policy))
        keys = self.tree.hash_blocks(self._root_hash(salt, windows), np.asarray(tokens[: max(max_length, 0)], np.int32))
        have, length = (hit.common_length // S, hit.length) if hit else (0, 0)
        sees_all = int(np.count_nonzero(windows == NO_WINDOW))
        parts = self.offloader.find_spans(keys[have:]) if sees_all else []
        upto = have + sum(p.end - p.begin for p in parts) if sees_all else len(keys)
        rings = None
        if sees_all < len(windows):
            there = ((i, self.offloader.find_windows(keys[i - 1])) for i in range(upto, length // S, -1))
            upto, rings = next(((i, w) for i, w in there if w and w.span.min_resume_position <= i * S), (0, None))
            parts = self.offloader.find_spans(keys[have:upto]) if sees_all else []
        if upto * S <= length:
            return None
        if self.offloader.probe_config and sum(len(p.span.keys) - p.end + p.begin for p in parts) > EXTRA_TABLE_PAGES:
            return None
        if not self.offloader.should_load([*parts, rings] if rings else parts, upto * S - length):
            return None
        none = np.zeros((sees_all, self.cache.spec.kv_heads, 0), np.int32)
        pages, selective = (
            hit.pages[..., : min(have, upto)] if hit else none,
            bool(self.offloader.probe_config and parts),
        )
        return AttachPlan(upto * S, pages, None, parts, rings, selective)

    def _start_selective_load(self, row: int, plan: AttachPlan, jobs: dict[int, list[ReadJob]]) -> LayerLoader:
        """A row that will have only what is important to it. Its table is shorter than its text is."""
        c, S, had = self.cache, self.cache.page_size, plan.pages.shape[-1]
        assert self.offloader and self.offloader.probe_config
        layers = np.flatnonzero(c.window[row] == NO_WINDOW)
        upto = had + sum(len(p.span.keys) for p in plan.span_ranges)
        c.ring_base[row, layers] = plan.length - upto * S
        self.sparse_rows.add(row)
        c.device_tables.mark_dirty(row, dense=False)
        pages = c.pages[row, layers, :, had:upto].copy()

        def keep(layer: int, n: int) -> None:
            remove_pages(c, row, layer, had + n, upto)

        return self.selective_loader_class(
            *(self.offloader, self.offloader.probe_config, plan.span_ranges, layers.tolist(), pages, keep, jobs)
        )

    # ---- what is on its way --------------------------------------------------------------------------------------

    def load_hook(self, rows: Sequence[int], query_start_loc: Sequence[int]) -> Callable[[int, Tensor], None] | None:
        """What who computes calls before a layer looks; None: nothing is on its way to these rows.

        Fresh queries starts[b] : starts[b + 1] are those of rows[b].
        """
        ends = zip(rows, query_start_loc, query_start_loc[1:], strict=False)
        fetches = [(f, begin, end) for row, begin, end in ends if (f := self.loads.get(row))]

        def before(layer: int, q: Tensor) -> None:
            for fetch, begin, end in fetches:
                fetch.wait_layer(layer, q[begin:end])
            self.cache.device_tables.upload()  # what was chosen has shortened tables

        return before if fetches else None

    def finish_load(self, row: int | None) -> bool:
        """After a step: whether everything has come that the row waited for. If not, it is good for nothing."""
        fetch = None if row is None else self.loads.pop(row, None)
        if fetch and not fetch.finish():
            return False
        if fetch and row not in self.cache.evictors and row not in self.sparse_rows:
            for store, span in fetch.loaded_spans:
                if not store.write_through and not span.window_starts:
                    store.delete(span)  # it will be in the tree
        return True

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """A step that waited for nothing took so long."""
        if self.offloader and num_tokens >= self.cache.page_size:
            self.offloader.cost_model.record_compute(num_tokens, seconds)

    def cancel_load(self, row: int) -> None:
        """Nothing comes into its pages any more."""
        self.sparse_rows.discard(row)
        if fetch := self.loads.pop(row, None):
            fetch.cancel()

    # ---- leaving -------------------------------------------------------------------------------------------------

    def insert(
        self,
        row: int,
        policy: Policy,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        salt: str,
        still_running: bool = False,
    ) -> None:
        """Keep what a row has computed: these tokens, of which the first `prompt` were asked.

        `goes_on`: it will write more, so only whole pages are shared.
        """
        c, S = self.cache, self.cache.page_size
        end = len(tokens) if self.config.keep == "all" else min(len(tokens), num_prompt_tokens)
        end = end // S * S if still_running else end
        if not end or row in c.evictors or row in self.loads or row in self.sparse_rows:
            return
        sees_all, slide = c.window[row] == NO_WINDOW, np.flatnonzero(c.window[row] < NO_WINDOW)
        rings = self._capture_sliding_windows(row, slide, end, still_running) if len(slide) else None
        if rings or not len(slide):
            pages = c.pages[row, sees_all, :, : -(-end // S)]
            first = self._root_hash(salt, c.windows(policy))
            if self.offloader:
                links = self.tree.hash_blocks(first, np.asarray(tokens[:end], np.int32))
                self.offloader.on_computed(links, 0, pages[..., : len(links)], rings if end % S == 0 else None)
            self.tree.insert(first, tokens[:end], pages, rings)

    def _capture_sliding_windows(
        self, row: int, layers: NDArray[np.intp], end: int, still_running: bool
    ) -> SlidingWindows | None:
        """The pages of the layers that slide, as they are before position `end`. None where they are no more."""
        c, S, last = self.cache, self.cache.page_size, -(-end // self.cache.page_size)
        firsts, found, least = [], [], 0
        for layer in layers:
            W, capacity, base = (int(x[row, layer]) for x in (c.window, c.capacity, c.ring_base))
            first = max((end - W) // S, last - capacity // S, base // S, 0)
            places = (np.arange(first, last) * S - base) % capacity // S
            pages = c.pages[row, layer][:, places]
            firsts.append(first)
            found.append(pages)
            # Who came later may have written over the oldest; all heads of a ring hold the same positions.
            here = np.arange(first * S, end)
            there = c.kv.pos[c.kv.to_index(pages[0])].flatten()[: len(here)].cpu().numpy()
            lost = here[there != here]
            begin = int(lost[-1]) + 1 if len(lost) else first * S
            least = max(least, begin + W - 1 if begin else 0)
        if least > end:
            return None
        pages = np.concatenate([p.ravel() for p in found])
        if not still_running:
            c.pool.incref(pages)
            return SlidingWindows(tuple(firsts), tuple(found), least)
        if not c.pool.ensure_free(len(pages)):
            return None
        copies = c.pool.allocate(len(pages))
        c.backend.copy(c.kv, c.kv.to_index(pages), c.kv.to_index(copies))
        each = np.split(copies, np.cumsum([p.size for p in found])[:-1])
        return SlidingWindows(tuple(firsts), tuple(x.reshape(p.shape) for x, p in zip(each, found, strict=True)), least)


def _max_skippable_tokens(policy: BudgetPolicy) -> int:
    """Tokens of the prompt, the first ones, that need no query: they leave nothing on slots, and are there at once."""
    if policy.prefill != "exact":
        return 0
    watch = policy.query_weights(np.arange(policy.prompt_len, dtype=np.int32), 1)
    seen = np.flatnonzero(watch.weights).tolist() if watch else []
    return min([*seen[:1], policy.prompt_len - 1])
