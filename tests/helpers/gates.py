"""Gates with random numbers, for models that none is fitted for."""

from __future__ import annotations

import torch

from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kv.eviction.gate_weights import NUM_LOGS, Gate, GateWeights
from retain.kv.eviction.head_shares import BUDGETS, HeadShares


def random_gate(spec: KVCacheSpec) -> Gate:
    """Return both gates and the shares of heads, of the unwindowed layers; equal models get equal numbers."""
    return Gate(random_weights(spec, 0), random_weights(spec, 1), random_shares(spec))


def random_shares(spec: KVCacheSpec) -> HeadShares:
    """Return shares of the heads of a model, of which none keeps fewer tokens where the budget is larger."""
    group = spec.full_attention_group
    size = len(group.caches), group.num_kv_heads
    kept = torch.rand(len(BUDGETS), *size, generator=torch.Generator().manual_seed(2)).sort(0, descending=True).values
    return HeadShares(kept * torch.tensor(BUDGETS)[:, None, None] / kept.mean((1, 2), keepdim=True).clamp(min=0.5))


def random_weights(spec: KVCacheSpec, seed: int) -> GateWeights:
    """Return the numbers of a gate; equal seeds give equal ones."""
    rng = torch.Generator().manual_seed(seed)
    group = spec.full_attention_group
    M, G = len(group.caches), group.num_kv_heads
    key, value = (torch.randn(M, G, n, generator=rng) for n in (group.k_dim, group.v_dim))
    return GateWeights(key, value, torch.randn(M, G, NUM_LOGS, generator=rng), torch.randn(M, G, generator=rng))
