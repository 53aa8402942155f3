"""What the layers of a model cache: one value for each cache, and the groups of caches whose slots are equal.

The names are vLLM's (vllm/v1/kv_cache_interface.py). A layer without attention caches other numbers in slots: inputs
of a short convolution; or, of linear attention, tokens and the states that they fold into at page ends. Such a layer
has several caches, an MLP has none. Caches are numbered in the order of their use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class FullAttentionSpec:
    """A layer that caches every token: a slot has `k_dim` and `v_dim` numbers in each of `num_kv_heads` heads."""

    num_kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def window(self) -> int | None:
        """Return None: a query sees all tokens before it."""
        return None


@dataclass(frozen=True)
class SlidingWindowSpec:
    """A layer whose queries see the latest `window` tokens, their own included. Older ones are overwritten."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int


@dataclass(frozen=True)
class SharedCacheSpec:
    """A layer that attends to what an earlier one has cached, and caches nothing (Gemma 3n, arXiv 2405.05254)."""

    cache: int  # of the earlier layer


@dataclass(frozen=True)
class ConvolutionSpec:
    """A causal convolution over the latest `window` tokens: a slot has its inputs, divided into heads of K and V."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int


@dataclass(frozen=True)
class LinearTokensSpec:
    """The tokens of linear attention since the last page end: a slot has a key with its decay, and a value.

    A head is one of values; a slot has K of `key_dim` + 8 numbers (kernels/linear_attention.py).
    """

    num_kv_heads: int
    key_dim: int
    v_dim: int
    window: int = 16  # the tokens of a page of states

    @property
    def k_dim(self) -> int:
        """A key, its decay, and 7 numbers that are not used: sizes are multiples of 8."""
        return self.key_dim + 8


@dataclass(frozen=True)
class LinearStateSpec:
    """The states of linear attention at page ends: matrices of `num_rows` rows of `k_dim` numbers in each value head.

    A slot has one row in K and one in V. A page has the state behind its last token, or a part of it: then a value head
    is several heads here.
    """

    num_value_heads: int
    num_rows: int
    k_dim: int
    page_size: int = 16

    @property
    def v_dim(self) -> int:
        """A row, as in K."""
        return self.k_dim

    @property
    def window(self) -> int:
        """A token needs the state at the end of the page before its own."""
        return self.page_size + 1

    @property
    def num_kv_heads(self) -> int:
        """The parts of all states."""
        return self.num_value_heads * -(-self.num_rows // (2 * self.page_size))


@dataclass(frozen=True)
class DraftHeadSpec(FullAttentionSpec):
    """The layer of a draft head, which sees all tokens. What is in its slots changes drafts alone, and no answer."""


AttentionSpec = FullAttentionSpec | SlidingWindowSpec
StateSpec = ConvolutionSpec | LinearTokensSpec | LinearStateSpec
OwnCacheSpec = AttentionSpec | StateSpec
LayerCacheSpec = OwnCacheSpec | SharedCacheSpec


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """A group of caches whose slots have the same size, so that they share pages and tables of one shape."""

    caches: tuple[int, ...]  # ascending; none is shared from an earlier layer
    num_kv_heads: int
    k_dim: int
    v_dim: int
    windows: tuple[int | None, ...]  # of each of these caches
    # Whether slots hold numbers of layers without attention, in float32. Queries of a step need no slots of the step's
    # own tokens then: only the last of these are written, as many as a ring has room for.
    is_state: bool = False
    is_draft: bool = False  # whether these are layers of a draft head, which no layer of the model is compared with


@dataclass(frozen=True)
class KVCacheSpec:
    """What all layers of a model cache. Raises ValueError where a layer shares the cache of one that has none."""

    caches: tuple[LayerCacheSpec, ...]  # in the order of their use: a layer may have several, or none
    uncached_layers: tuple[int, ...] = ()  # the numbers in the model of layers that cache nothing

    def __post_init__(self) -> None:
        for i, cache in enumerate(self.caches):
            if isinstance(cache, SharedCacheSpec):
                source = self.caches[cache.cache] if 0 <= cache.cache < i else cache
                if isinstance(source, SharedCacheSpec):
                    raise ValueError(f"cache {i} is that of cache {cache.cache}, which is none before it")

    def source_cache(self, cache: int) -> int:
        """Return the cache whose slots a cache has: itself, unless it is shared from an earlier layer."""
        spec = self.caches[cache]
        return spec.cache if isinstance(spec, SharedCacheSpec) else cache

    def attention(self, cache: int) -> OwnCacheSpec:
        """Return the sizes of a cache."""
        spec = self.caches[self.source_cache(cache)]
        assert not isinstance(spec, SharedCacheSpec)
        return spec

    @property
    def has_states(self) -> bool:
        """Whether layers without attention cache something."""
        return any(isinstance(cache, StateSpec) for cache in self.caches)

    @property
    def state_group(self) -> KVCacheGroupSpec | None:
        """The states of linear attention, if there are any. Raises ValueError where their sizes differ."""
        states = [cache for cache in self.caches if isinstance(cache, LinearStateSpec)]
        if len({(s.num_value_heads, s.num_rows, s.k_dim) for s in states}) > 1:
            raise ValueError("layers of linear attention must be alike")
        return next((g for g in self.groups if isinstance(self.caches[g.caches[0]], LinearStateSpec)), None)

    def fold_at(self, page_size: int) -> KVCacheSpec:
        """Return the same caches, where pages of the states of linear attention have so many slots."""

        def resize(cache: LayerCacheSpec) -> LayerCacheSpec:
            if isinstance(cache, LinearTokensSpec):
                return replace(cache, window=page_size)
            return replace(cache, page_size=page_size) if isinstance(cache, LinearStateSpec) else cache

        return replace(self, caches=tuple(resize(cache) for cache in self.caches))

    @property
    def has_shared_caches(self) -> bool:
        """Whether some layers attend to the cache of another one."""
        return any(isinstance(cache, SharedCacheSpec) for cache in self.caches)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each cache, in tokens; None is full attention."""
        return tuple(self.attention(i).window for i in range(len(self.caches)))

    @cached_property
    def layer_numbers(self) -> tuple[int, ...]:
        """For each cache, the number of its layer in the model.

        A layer of linear attention has three: of its convolution, then of tokens, then of states.
        """
        is_first = [not isinstance(cache, LinearTokensSpec | LinearStateSpec) for cache in self.caches]
        uncached = set(self.uncached_layers)
        cached = [i for i in range(len(self.caches) + len(uncached)) if i not in uncached]
        return tuple(cached[places - 1] for places in accumulate(is_first))

    @cached_property
    def first_caches(self) -> dict[int, int]:
        """By the number of a layer that caches something: the number of its first cache."""
        return {layer: cache for cache, layer in reversed(list(enumerate(self.layer_numbers)))}

    @property
    def num_layers(self) -> int:
        """All layers of the model."""
        return len(set(self.layer_numbers)) + len(self.uncached_layers)

    @cached_property
    def groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups of all caches that are not shared, in the order of their first ones."""
        return self._group(range(len(self.caches)))

    @cached_property
    def group_indices(self) -> tuple[tuple[int, int], ...]:
        """For each cache, the group that has its slots, and the place in that group."""
        places = {cache: (j, i) for j, group in enumerate(self.groups) for i, cache in enumerate(group.caches)}
        return tuple(places[self.source_cache(i)] for i in range(len(self.caches)))

    @property
    def num_traced_heads(self) -> int:
        """The kv heads that stand for those of any layer: the least common multiple of their numbers."""
        return math.lcm(*(group.num_kv_heads for group in self.attention_groups))

    @property
    def attention_groups(self) -> list[KVCacheGroupSpec]:
        """The groups of the model's layers that attend."""
        return [group for group in self.groups if not group.is_state and not group.is_draft]

    @property
    def full_caches(self) -> list[int]:
        """The caches of the model's layers without a window."""
        drafts = {i for group in self.groups if group.is_draft for i in group.caches}
        return [i for i, window in enumerate(self.windows) if window is None and i not in drafts]

    @property
    def only_group(self) -> KVCacheGroupSpec:
        """The caches, where all are alike. Raises ValueError where they differ."""
        if len(self.groups) != 1:
            raise ValueError("layers must be alike here: they differ in heads or head dims")
        return self.groups[0]

    @property
    def can_compare_layers(self) -> bool:
        """Whether the caches without a window are alike, so that a policy may rank slots of several ones together."""
        return sum(None in group.windows for group in self.attention_groups) <= 1

    @property
    def full_attention_group(self) -> KVCacheGroupSpec:
        """The caches without a window. Raises ValueError where they differ, or there are none."""
        groups = self._group(self.full_caches)
        if len(groups) != 1:
            found = "there is none" if not groups else "they differ in heads or head dims"
            raise ValueError(f"layers without a window must be alike here: {found}")
        return groups[0]

    def _group(self, caches: Sequence[int]) -> tuple[KVCacheGroupSpec, ...]:
        found: dict[KVCacheGroupSpec, list[int]] = {}
        for i in caches:
            if self.source_cache(i) == i:
                a = self.attention(i)
                # Caches of states are of one kind in a group: each kind divides its pages in its own way.
                kinds = isinstance(a, StateSpec), isinstance(a, DraftHeadSpec)
                alike = KVCacheGroupSpec((), a.num_kv_heads, a.k_dim, a.v_dim, (), *kinds)
                kind = replace(alike, windows=(a.window,)) if alike.is_state else alike
                found.setdefault(kind, []).append(i)
        windows = self.windows
        return tuple(replace(kind, caches=tuple(g), windows=tuple(windows[i] for i in g)) for kind, g in found.items())


def convolution_spec(channels: int, window: int, largest: int = 128) -> ConvolutionSpec:
    """Return the slots of a convolution: as few heads as K and V of at most `largest` numbers, or of 8, allow.

    In float32 half as many numbers as in attention's slots of 16 bits take as many bytes: then pages have as many
    slots. Raises ValueError unless the channels divide into K and V of multiples of 8 numbers.
    """
    sizes = (n for n in range(max(largest // 8 * 8, 8), 0, -8) if channels % (2 * n) == 0)
    if not (size := next(sizes, 0)):
        raise ValueError(f"a convolution over {channels} channels is not supported: only over multiples of 16")
    return ConvolutionSpec(channels // (2 * size), size, size, window)


def uniform_layers(num_kv_heads: int, head_dim: int, windows: Sequence[int | None]) -> tuple[LayerCacheSpec, ...]:
    """Return layers that differ in nothing but their windows; None is full attention."""
    sizes = num_kv_heads, head_dim, head_dim
    return tuple(FullAttentionSpec(*sizes) if w is None else SlidingWindowSpec(*sizes, w) for w in windows)
