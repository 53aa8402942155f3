"""Statistics of one request: the bytes and slots that its cache took, beside those of full caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retain.kernels.api import NO_WINDOW

STATE = "state"  # the kind of layers without attention, and in place of their policy


@dataclass(frozen=True)
class RequestMemory:
    """Slots of each layer's largest head: the most ever owned, and those owned at the end; pages at the end.

    Both lists are empty for a request that never owned pages.
    """

    peak_slots: Sequence[int]
    final_slots: Sequence[int]
    num_final_pages: int


@dataclass(frozen=True)
class LoadStats:
    """A load from tiers: its times (seconds, of perf_counter), tokens, and the bytes that were read, by tier."""

    started_at: float
    finished_at: float
    num_tokens: int
    bytes_by_tier: Mapping[str, int]
    failed: bool = False  # the tokens are computed


@dataclass(frozen=True)
class LayerSizes:
    """A cache of a layer: the layer's number in the model, how far it sees, its kv heads, and slots of a page.

    `is_state`: it has no attention, and no policy or text makes what it caches larger or smaller.
    """

    layer: int
    window: int
    num_kv_heads: int
    page_size: int
    is_state: bool = False

    @property
    def kind(self) -> str:
        """What kind of layer it is: full, sliding or state."""
        return STATE if self.is_state else "full" if self.window == NO_WINDOW else "sliding"


def request_memory_stats(
    *,
    policy: str,
    unwindowed: str,
    layers: Sequence[LayerSizes],
    num_tokens: int,
    memory: RequestMemory,
    page_bytes: int,
) -> dict[str, Any]:
    """Return bytes and slots of a text, by groups of layers with the same window, beside full caches.

    Layers without attention are one more group, of policy "state". `policy` and `unwindowed` are specs: of the
    request, and of its layers without a window.
    """
    by_policy: dict[str, list[tuple[int, LayerSizes]]] = {}
    for i, sizes in sorted(enumerate(layers), key=lambda x: -1 if x[1].is_state else x[1].window, reverse=True):
        by_policy.setdefault(_policy_of(sizes, unwindowed), []).append((i, sizes))
    groups = []
    for own_policy, own in by_policy.items():
        # Nothing is recorded of a request that ended before it had a row, such as one that shared another's prompt.
        peaks = [memory.peak_slots[i] if memory.peak_slots else 0 for i, _ in own]
        num_pages = sum(slots // s.page_size * s.num_kv_heads for slots, (_, s) in zip(peaks, own, strict=True))
        num_full_pages = sum(-(-num_tokens // s.page_size) * s.num_kv_heads for _, s in own)
        groups.append(
            {
                "layers": sorted({sizes.layer for _, sizes in own}),
                "kind": own[0][1].kind,
                "policy": own_policy,
                "slots_peak": max(peaks),
                "slots_end": max(memory.final_slots[i] for i, _ in own) if memory.final_slots else 0,
                "bytes_peak": num_pages * page_bytes,
                "bytes_if_full": (num_pages if own_policy == STATE else num_full_pages) * page_bytes,
            }
        )
    return {
        "policy": policy,
        "bytes_peak": sum(g["bytes_peak"] for g in groups),
        "bytes_end": memory.num_final_pages * page_bytes,
        "bytes_if_full": sum(g["bytes_if_full"] for g in groups),
        "groups": groups,
    }


def _policy_of(sizes: LayerSizes, unwindowed: str) -> str:
    if sizes.is_state:
        return STATE
    return unwindowed if sizes.window == NO_WINDOW else f"ring:window={sizes.window}"
