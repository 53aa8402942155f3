"""Capacity planning: how far layers see, and the most pages that a request needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import NO_WINDOW
from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.slots.kv_cache_spec import KVCacheGroupSpec, KVCacheSpec, StateSpec
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.gate_weights import Gate
from retain.kv.eviction.policy import EvictionPolicy, GateLoader
from retain.kv.memory.cache import ring_capacities
from retain.kv.memory.group_pages import GroupPages
from retain.kv.stats.request import LayerSizes
from retain.types import Ints


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of a cache: slots of a page, rows, tokens of the longest text, fresh tokens of a step.

    `page_size` is of the layers whose slots take the most bytes. `score_columns`: masses of a slot, one for each query
    head of a kv head, or one for all. `demoted_page_size`: slots of a page of demoted tokens; 0 where no policy may
    demote. `snapshot_interval`: tokens between the rungs of a long text, where checkpoints stay; 0: none.
    `has_sketches`: whether pages have what policies need that look at few slots. `offload_folder`: of a file with
    `offload_bytes` of K and V; empty where they lie in memory. `kv_heads`: those of attention that this rank
    has.
    """

    page_size: int
    max_running_requests: int
    max_model_len: int
    max_batched_tokens: int
    score_columns: int = 1
    demoted_page_size: int = 0
    snapshot_interval: int = 2048
    has_sketches: bool = False
    offload_folder: str = ""
    offload_bytes: int = 0
    kv_heads: KVHeads = ALL_HEADS


def refuse_gates(file: str) -> Gate:
    """Raise ValueError: this cache has no model whose gates could be found."""
    raise ValueError("gate: no gates can be loaded here")


@dataclass(frozen=True)
class GroupPlanner:
    """Plan the pages of requests in the layers of one KV cache group.

    A page has `page_size` slots, or `demoted_page_size` of demoted tokens (0: none demote); a block has `block_size`
    tokens.
    """

    group: KVCacheGroupSpec
    config: CacheConfig
    page_size: int
    demoted_page_size: int
    block_size: int

    @property
    def model_windows(self) -> Ints:
        """How far each layer of the group sees, [L]."""
        return np.array([w or NO_WINDOW for w in self.group.windows], np.int32)

    @property
    def max_pages_per_head(self) -> int:
        """Pages of the longest text; of its ring where that is a state."""
        if self.group.is_state:
            return int(ring_capacities(self.model_windows, 1, self.page_size, self.block_size).max()) // self.page_size
        return -(-self.config.max_model_len // self.page_size)

    @property
    def num_heads(self) -> int:
        """The kv heads of all layers."""
        return len(self.group.caches) * self.group.num_kv_heads

    def windows(self, policy: EvictionPolicy) -> Ints:
        """Return how far each layer sees, [L]: the model's own window, or the policy's where that is shorter."""
        return self.model_windows if self.group.is_state else np.minimum(self.model_windows, _policy_window(policy))

    def pages_of_text(self, length: int) -> int:
        """Return the pages of a text of so many tokens in all layers and heads, if all that a layer has is kept."""
        return self.num_heads * min(-(-length // self.page_size), self.max_pages_per_head)

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages that a request owns at most on the way to `length` tokens.

        It starts with `num_uncomputed_tokens`, which are computed in chunks.
        """
        S = self.page_size
        windows = self.windows(policy)
        plan = policy.plan
        fresh = min(plan.fresh_tokens(num_uncomputed_tokens), self.config.max_batched_tokens)
        fresh = 1 if self.group.is_state else fresh
        ring_pages = self._ring_pages(policy, length, ring_capacities(windows, fresh, S, self.block_size))
        full = plan.peak_slots(length)
        if policy.has_budget:
            full = min(full, self.max_pages_per_head * S)
        num_full = int((windows == NO_WINDOW).sum())
        before = int(np.where(windows == NO_WINDOW, -(-full // S), ring_pages).sum())
        if not plan.demoted_slots(length):
            return before * self.group.num_kv_heads
        if plan.is_streamed:  # the demoted tokens of the prompt are beside its last chunk
            before += num_full * plan.demoted_pages(min(length, plan.prompt_len), self.demoted_page_size)
        after = num_full * plan.pages_after_demotion(length, S, self.demoted_page_size)
        return max(before, after + int(ring_pages[windows < NO_WINDOW].sum())) * self.group.num_kv_heads

    def pages_held(self, policy: EvictionPolicy, num_kept: int, length: int) -> int:
        """Return the pages of a text of `length` tokens, of which layers without a window keep `num_kept` exactly."""
        S = self.page_size
        windows = self.windows(policy)
        ring = np.minimum(length, ring_capacities(windows, 1, S, self.block_size))
        pages = -(-np.where(windows == NO_WINDOW, num_kept, ring) // S)  # [L], of a head
        pages += (windows == NO_WINDOW) * policy.plan.demoted_pages(length, self.demoted_page_size)
        return int(pages.sum()) * self.group.num_kv_heads

    def _ring_pages(self, policy: EvictionPolicy, length: int, capacities: Ints) -> Ints:
        """Return the most pages of a head in each layer [L] if that is a ring; in a scoring pass with its copy."""
        S = self.page_size
        behind = policy.plan.scoring_tokens
        pages: Ints = -(-np.minimum(length + behind, capacities) // S)
        return pages - (-np.minimum(length, capacities) // S) * (behind > 0)


@dataclass(frozen=True)
class CapacityPlanner:
    """Plan the pages of requests in a cache for a model.

    `pages` divides pages into slots of each KV cache group. Without it they all have the sizes in `config`.
    """

    spec: KVCacheSpec
    config: CacheConfig
    load_gate: GateLoader = refuse_gates
    pages: GroupPages | None = field(default=None, kw_only=True)

    @cached_property
    def groups(self) -> tuple[GroupPlanner, ...]:
        """The planners of the KV cache groups."""
        c = self.config
        sizes = [(c.page_size, c.demoted_page_size)] * len(self.spec.groups)
        if self.pages:
            demoted = [f.page_size if f else 0 for f in self.pages.demoted_formats] or [0] * len(sizes)
            sizes = list(zip((f.page_size for f in self.pages.formats), demoted, strict=True))
        block_size = max(page_size for page_size, _ in sizes)
        return tuple(GroupPlanner(g, c, *x, block_size) for g, x in zip(self.spec.groups, sizes, strict=True))

    @property
    def block_size(self) -> int:
        """The tokens of a block of the prefix cache: slots of the largest page."""
        return self.groups[0].block_size

    @property
    def model_windows(self) -> Ints:
        """How far each layer of the model sees, [L]."""
        return np.array([w or NO_WINDOW for w in self.spec.windows], np.int32)

    @property
    def max_pages(self) -> int:
        """Pages of the longest text, in all layers and heads."""
        return self.pages_of_text(self.config.max_model_len)

    def pages_of_text(self, length: int) -> int:
        """Return the pages of a text of so many tokens, in all layers and heads, if all of them are kept."""
        return sum(g.pages_of_text(length) for g in self.groups)

    def pages_held(self, policy: EvictionPolicy, num_kept: int, length: int) -> int:
        """Return the pages of a text, in all layers and heads, see GroupPlanner.pages_held."""
        return sum(g.pages_held(policy, num_kept, length) for g in self.groups)

    def ring_overwrites(self, policy: EvictionPolicy, num_tokens: int) -> int:
        """Return the slots that rings overwrite in a text of so many tokens."""
        found = 0
        for g in self.groups:
            windows = g.windows(policy)
            overwritten = np.maximum(num_tokens - windows[windows < NO_WINDOW], 0)
            found += 0 if g.group.is_state else int(overwritten.sum()) * g.group.num_kv_heads
        return found

    def windows(self, policy: EvictionPolicy) -> Ints:
        """Return how far each layer sees, [L]: the model's own window, or the policy's where that is shorter."""
        shorter = np.minimum(self.model_windows, _policy_window(policy))
        return np.where(self._state_layers, self.model_windows, shorter)

    @cached_property
    def _state_layers(self) -> NDArray[np.bool_]:
        """Mark the layers without attention, [L]."""
        return np.array([isinstance(layer, StateSpec) for layer in self.spec.caches])

    def layer_sizes(self, policy: EvictionPolicy) -> list[LayerSizes]:
        """Return the sizes of the caches of layers, in their order in the model."""
        numbers = self.spec.layer_numbers
        found = [
            (cache, LayerSizes(numbers[cache], int(window), g.group.num_kv_heads, g.page_size, g.group.is_state))
            for g in self.groups
            for cache, window in zip(g.group.caches, g.windows(policy), strict=True)
        ]
        return [sizes for _, sizes in sorted(found, key=itemgetter(0))]

    def effective_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Return a resolved policy as this cache carries it out. Raises ValueError where it cannot.

        A model whose layers all slide keeps rings under every policy: that is `full`.
        """
        if not self.spec.full_caches:
            return policies.parse("full")
        share = getattr(policy, "share", "none")
        compares_layers = share in ("all", "fitted") or getattr(policy, "scope", "") == "shared"
        if compares_layers and not self.spec.can_compare_layers:
            alike = "layers without a window that are alike: use share=layer"
            raise ValueError(f"share=all, share=fitted and scope=shared need {alike}")
        if isinstance(policy, BudgetPolicy):
            policy = replace(policy, kv_heads=self.config.kv_heads)
            if policy.ragged and policy.modes.demote and policy.kv_heads is not ALL_HEADS:
                # A head has pages for the most that any rank's keeps and for the most that one demotes: too many.
                alone = "demote goes with heads that divide a budget on one rank alone: use tensor_parallel=1"
                raise ValueError(f"{policies.to_spec(policy)}: {alone}")
            if self.spec.has_shared_caches and policy.modes.refit:
                policy = replace(policy, modes=replace(policy.modes, refit=0))  # several layers read such values
        return policy.fit(self.config.max_model_len, self.load_gate)

    @property
    def has_gate(self) -> bool:
        """Whether a gate is found for the model where no file is named."""
        try:
            return self.load_gate("").attention is not None
        except ValueError:
            return False

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages that a request owns at most on the way to `length` tokens, in all layers."""
        return sum(g.pages_needed(policy, length, num_uncomputed_tokens) for g in self.groups)


def _policy_window(policy: EvictionPolicy) -> int:
    return policy.ring_window or NO_WINDOW
