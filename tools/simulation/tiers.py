"""Simulated tiers: which pages lie below a pool, and how long it takes to read them.

A setting is `none`, or tiers joined by a plus sign: `local:capacity=1GiB,read=1GB+shared:latency=0.02,read=200MB`.
A local tier belongs to one replica and takes what its pool evicts, as `--tier ram` does. The shared tier belongs to
all replicas and takes what they compute, as an object store does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Protocol

from retain.kv.stores.shared_store import load_time_limit
from retain.options import NonNegativeFloat, Size, check_bounds
from retain.plugins import from_strings, parse_spec

KINDS = ("local", "shared")


@dataclass(frozen=True)
class TierConfig:
    """Options of a simulated tier. Raises ValueError."""

    read: Size  # bytes per second
    latency: NonNegativeFloat = 0.0  # seconds before the first byte of a read
    capacity: Size | None = None  # None: unlimited

    def __post_init__(self) -> None:
        check_bounds(self)


def parse_setting(setting: str) -> dict[str, TierConfig]:
    """Return the tiers of a setting by their kind, in the order in which they are searched. Raises ValueError."""
    if setting == "none":
        return {}
    found: dict[str, TierConfig] = {}
    for spec in setting.split("+"):
        kind, options = parse_spec(spec)
        if kind not in KINDS or kind in found:
            raise ValueError(f"{setting!r}: a setting is none, or one tier or two of {', '.join(KINDS)}, joined by +")
        found[kind] = from_strings(TierConfig, kind, options)
    return {kind: found[kind] for kind in KINDS if kind in found}


class KeyListener(Protocol):
    """Hears of whole pages, by their keys, that a place has now or no more. Each page is named once."""

    def on_stored(self, keys: Sequence[bytes]) -> None:
        """Note that the place has these pages now."""

    def on_evicted(self, keys: Sequence[bytes]) -> None:
        """Note that the place has these pages no more."""


class SimulatedTier:
    """The pages of a tier by their keys. When it is full, the least recently used page goes."""

    def __init__(self, kind: str, config: TierConfig, page_bytes: int, listener: KeyListener | None = None):
        self.kind, self.config, self.page_bytes, self.listener = kind, config, page_bytes, listener
        self.write_through = kind == "shared"
        self.num_read_bytes = self.num_written_bytes = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def time_limit(self, compute_seconds: float | None) -> float:
        """Return the seconds that a load may take: the shared tier's are limited as the remote tier's are."""
        return load_time_limit(compute_seconds) if self.kind == "shared" else inf

    def add(self, keys: Iterable[bytes]) -> None:
        """Write the pages that the tier lacks."""
        new = [key for key in keys if key not in self._keys]
        self._keys |= dict.fromkeys(new)
        self.num_written_bytes += len(new) * self.page_bytes
        if self.listener:
            self.listener.on_stored(new)
        capacity = self.config.capacity
        too_many = 0 if capacity is None else max(len(self._keys) - capacity // self.page_bytes, 0)
        self.remove(list(islice(self._keys, too_many)))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use of pages."""
        for key in reversed(keys):  # the end of a text goes before its beginning
            self._keys.move_to_end(key)

    def read(self, keys: Sequence[bytes]) -> float:
        """Count a read of pages, and return the seconds that it takes."""
        num_bytes = len(keys) * self.page_bytes
        self.num_read_bytes += num_bytes
        return self.config.latency + num_bytes / self.config.read

    def remove(self, keys: Iterable[bytes]) -> None:
        """Drop pages, where the tier has them."""
        gone = [key for key in keys if key in self._keys]
        for key in gone:
            del self._keys[key]
        if self.listener:
            self.listener.on_evicted(gone)
