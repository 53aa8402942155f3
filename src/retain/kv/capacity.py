"""Capacity planning: how far layers see, and the most pages that a request needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kernels.kv_cache_spec import KVCacheGroupSpec, KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.gate_weights import GateWeights
from retain.kv.eviction.policy import CacheLimits, EvictionPolicy
from retain.kv.memory.cache import ring_capacities
from retain.types import Ints


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of a cache: slots of a page, rows, tokens of the longest text, fresh tokens of a step.

    `score_columns`: masses of a slot, one for each query head of a kv head, or one for all. `demoted_page_size`: slots
    of a page of demoted tokens; 0 where no policy may demote.
    """

    page_size: int
    max_running_requests: int
    max_model_len: int
    max_batched_tokens: int
    score_columns: int = 1
    demoted_page_size: int = 0


def refuse_gates(file: str) -> GateWeights:
    """Raise ValueError: this cache has no model whose gates could be found."""
    raise ValueError("gate: no gates can be loaded here")


@dataclass(frozen=True)
class CapacityPlanner:
    """Plan the pages of requests in a cache for a model."""

    spec: KVCacheSpec
    config: CacheConfig
    load_gate: Callable[[str], GateWeights] = refuse_gates

    @property
    def model_windows(self) -> Ints:
        """How far each layer of the model sees, [L]."""
        return np.array([w or NO_WINDOW for w in self.spec.windows], np.int32)

    @property
    def group(self) -> KVCacheGroupSpec:
        """The layers, which must be alike."""
        return self.spec.only_group

    @property
    def max_pages_per_head(self) -> int:
        """Pages of the longest text."""
        return -(-self.config.max_model_len // self.config.page_size)

    def windows(self, policy: EvictionPolicy) -> Ints:
        """Return how far each layer sees, [L]: the model's own window, or the policy's where that is shorter."""
        return np.minimum(self.model_windows, policy.ring_window or NO_WINDOW)

    def effective_policy(self, policy: EvictionPolicy) -> EvictionPolicy:
        """Return a resolved policy as this cache carries it out. Raises ValueError where it cannot.

        A model whose layers all slide keeps rings under every policy: that is `full`.
        """
        if None not in self.spec.windows:
            return policies.parse("full")
        c = self.config
        step_room = c.max_batched_tokens - c.max_running_requests
        return policy.fit(CacheLimits(c.max_model_len, step_room, self.pages_needed, self.load_gate))

    @property
    def has_gate(self) -> bool:
        """Whether a gate is found for the model where no file is named."""
        try:
            self.load_gate("")
        except ValueError:
            return False
        return True

    def pages_needed(self, policy: EvictionPolicy, length: int, num_uncomputed_tokens: int) -> int:
        """Return the pages that a request owns at most on the way to `length` tokens.

        It starts with `num_uncomputed_tokens`, which are computed in chunks.
        """
        S = self.config.page_size
        windows = self.windows(policy)
        fresh = min(policy.fresh_tokens(num_uncomputed_tokens), self.config.max_batched_tokens)
        ring_pages = self._ring_pages(policy, length, ring_capacities(windows, fresh, S))
        full = policy.peak_slots(length)
        if policy.has_budget:
            full = min(full, self.max_pages_per_head * S)
        scratch = -(-policy.scratch_slots(length) // S)
        before = int(np.where(windows == NO_WINDOW, -(-full // S), ring_pages).sum() + scratch)
        if not policy.demoted_slots(length):
            return before * self.group.num_kv_heads
        num_full = int((windows == NO_WINDOW).sum())
        if policy.prefill == "stream":  # the demoted tokens of the prompt are beside its last chunk
            before += num_full * self._demoted_pages(policy, min(length, cast(BudgetPolicy, policy).prompt_len))
        after = int(ring_pages[windows < NO_WINDOW].sum()) + num_full * self.pages_after_demotion(policy, length)
        return max(before, after) * self.group.num_kv_heads

    def _ring_pages(self, policy: EvictionPolicy, length: int, capacities: Ints) -> Ints:
        """Return the most pages of a head in each layer [L] if that is a ring; in a scoring pass with its copy."""
        S = self.config.page_size
        behind = policy.scoring_tokens
        pages: Ints = -(-np.minimum(length + behind, capacities) // S)
        return pages - (-np.minimum(length, capacities) // S) * (behind > 0)

    def pages_after_demotion(self, policy: EvictionPolicy, length: int) -> int:
        """Return the most pages that a head of an unwindowed layer owns at `length` tokens, once it demotes; resolved.

        Where heads share their budgets this is their mean.
        """
        budget = cast(BudgetPolicy, policy)
        kept = -(-budget.decode_slots // self.config.page_size)
        partial = 2 * budget.ragged  # heads that share budgets may each have two pages that are not full
        return kept + self._demoted_pages(policy, length) + partial

    def _demoted_pages(self, policy: EvictionPolicy, length: int) -> int:
        return -(-policy.demoted_slots(length) // self.config.demoted_page_size)
