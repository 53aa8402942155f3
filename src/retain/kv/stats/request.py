"""What a request cost, for people. What is not known here: requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.eviction import policies
from retain.kv.eviction.policies import Policy
from retain.kv.memory.cache import Cache


def request_memory_stats(
    cache: Cache,
    policy: Policy,
    num_tokens: int,
    peak_slots: Sequence[int],
    final_slots: Sequence[int],
    final_pages: int,
) -> dict[str, Any]:
    """Bytes and slots of a text of so many tokens, by groups of layers with the same policy, beside full caches.

    `peaks` and `owned` (at the end; may be empty) are slots of each layer's largest head, `held` pages at the end.
    """
    S, G = cache.page_size, cache.spec.kv_heads
    windows = cache.windows(policy)
    full = -(-num_tokens // S) * cache.page_bytes * G  # a layer's
    looks = policies.to_spec(policy) if policy.window is None else "full"
    groups = []
    for window in sorted(set(windows.tolist()), reverse=True):
        layers = np.flatnonzero(windows == window).tolist()
        most = [peak_slots[i] for i in layers]
        groups.append(
            {
                "layers": layers,
                "policy": f"ring:window={window}" if window != NO_WINDOW else looks,
                "slots_peak": max(most),
                "slots_end": max(final_slots[i] for i in layers) if final_slots else 0,
                "bytes_peak": sum(most) // S * cache.page_bytes * G,
                "bytes_if_full": full * len(layers),
            }
        )
    return {
        "policy": policies.to_spec(policy),
        "bytes_peak": sum(g["bytes_peak"] for g in groups),
        "bytes_end": final_pages * cache.page_bytes,
        "bytes_if_full": sum(g["bytes_if_full"] for g in groups),
        "groups": groups,
    }
