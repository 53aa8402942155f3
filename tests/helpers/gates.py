"""Gates with random numbers, for models that none is fitted for."""

from __future__ import annotations

import torch

from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kv.eviction.gate_weights import NUM_LOGS, Gate, GateWeights


def random_gate(spec: KVCacheSpec) -> Gate:
    """Return both gates for the unwindowed layers of a model; equal models get equal numbers."""
    return Gate(*(random_weights(spec, seed) for seed in (0, 1)))


def random_weights(spec: KVCacheSpec, seed: int) -> GateWeights:
    """Return the numbers of a gate; equal seeds give equal ones."""
    rng = torch.Generator().manual_seed(seed)
    group = spec.full_attention_group
    M, G = len(group.caches), group.num_kv_heads
    key, value = (torch.randn(M, G, n, generator=rng) for n in (group.k_dim, group.v_dim))
    return GateWeights(key, value, torch.randn(M, G, NUM_LOGS, generator=rng), torch.randn(M, G, generator=rng))
