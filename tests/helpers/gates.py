"""Gates with random numbers, for models that none is fitted for."""

from __future__ import annotations

import torch

from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kv.eviction.gate_weights import NUM_LOGS, Gate, GateWeights
from retain.kv.eviction.head_shares import BUDGETS, HeadShares


def random_gate(spec: KVCacheSpec, heads: KVHeads = ALL_HEADS) -> Gate:
    """Return both gates and the shares of heads, of the unwindowed layers; equal models get equal numbers."""
    group = spec.full_attention_group
    size = len(group.caches), heads.num_of_all(group.num_kv_heads)
    sizes = *size, group.k_dim, group.v_dim
    return Gate(random_weights(*sizes, 0), random_weights(*sizes, 1), random_shares(*size)).of_heads(heads)


def random_shares(*size: int) -> HeadShares:
    """Return shares of the heads of layers, of which none keeps fewer tokens where the budget is larger."""
    kept = torch.rand(len(BUDGETS), *size, generator=torch.Generator().manual_seed(2)).sort(0, descending=True).values
    return HeadShares(kept * torch.tensor(BUDGETS)[:, None, None] / kept.mean((1, 2), keepdim=True).clamp(min=0.5))


def random_weights(M: int, G: int, k_dim: int, v_dim: int, seed: int) -> GateWeights:
    """Return the numbers of a gate of M layers with G kv heads; equal seeds give equal ones."""
    rng = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(M, G, n, generator=rng) for n in (k_dim, v_dim))
    return GateWeights(key, value, torch.randn(M, G, NUM_LOGS, generator=rng), torch.randn(M, G, generator=rng))
