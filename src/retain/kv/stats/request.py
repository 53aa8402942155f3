"""Statistics of one request: the bytes and slots that its cache took, beside those of full caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.types import Ints


@dataclass(frozen=True)
class RequestMemory:
    """Slots of each layer's largest head: the most ever owned, and those owned at the end; pages at the end.

    Both lists are empty for a request that never owned pages.
    """

    peak_slots: Sequence[int]
    final_slots: Sequence[int]
    num_final_pages: int


def request_memory_stats(
    *,
    policy: str,
    unwindowed: str,
    windows: Ints,
    num_tokens: int,
    memory: RequestMemory,
    page_bytes: int,
    page_size: int,
    kv_heads: int,
) -> dict[str, Any]:
    """Return bytes and slots of a text, by groups of layers with the same window, beside full caches.

    `policy` and `unwindowed` are specs: of the request, and of its layers without a window.
    """
    G = kv_heads
    full = -(-num_tokens // page_size) * page_bytes * G  # of a layer
    groups = []
    for window in sorted(set(windows.tolist()), reverse=True):
        layers = np.flatnonzero(windows == window).tolist()
        # Nothing is recorded of a request that ended before it had a row, such as one that shared another's prompt.
        peaks = [memory.peak_slots[i] for i in layers] if memory.peak_slots else [0]
        groups.append(
            {
                "layers": layers,
                "policy": f"ring:window={window}" if window != NO_WINDOW else unwindowed,
                "slots_peak": max(peaks),
                "slots_end": max(memory.final_slots[i] for i in layers) if memory.final_slots else 0,
                "bytes_peak": sum(peaks) // page_size * page_bytes * G,
                "bytes_if_full": full * len(layers),
            }
        )
    return {
        "policy": policy,
        "bytes_peak": sum(g["bytes_peak"] for g in groups),
        "bytes_end": memory.num_final_pages * page_bytes,
        "bytes_if_full": sum(g["bytes_if_full"] for g in groups),
        "groups": groups,
    }
