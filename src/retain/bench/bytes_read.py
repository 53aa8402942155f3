"""The bytes of the cache that attention of a decode step reads, by arithmetic."""

from __future__ import annotations

import numpy as np

from retain.kernels.slots.pool_dtypes import INT4
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.policy import EvictionPolicy


def cache_bytes_read(planner: CapacityPlanner, policy: EvictionPolicy, num_tokens: int) -> float:
    """Return what attention of one token behind so many reads under a resolved policy: K, V, sketches and positions.

    A budget that evicts counts with all slots of its interval. Layers without a window look, where the policy does.
    """
    held = min(num_tokens, policy.plan.decode_slots)
    looked = int(policy.looked_slots(np.array([held], np.int32))[0])
    total = 0.0
    assert planner.pages, "a planner of an engine has them"
    for group, pages in zip(planner.groups, planner.pages.formats, strict=True):
        key, value = (size / pages.page_size for size in pages.bytes)
        whole = key + value + 4.0  # a position has four bytes
        chosen = value if pages.dtype == INT4 else key + value  # all keys of 4 bits are read in any case
        sketch = pages.sketch_bytes / pages.page_size + whole - chosen
        windows = group.windows(policy)
        num_looking = int((windows >= held).sum()) if pages.has_sketches and looked else 0
        seen = np.minimum(windows, held).sum() - num_looking * held
        total += group.group.num_kv_heads * (int(seen) * whole + num_looking * (looked * chosen + held * sketch))
    return total
