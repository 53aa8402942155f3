"""Tiers: where pages go that the pool has no room for, or that must outlive the process.

A tier is one file of this package, selected by its name: `parse("disk:path=store,capacity=50GiB")`. The file defines
`class Tier`, a frozen dataclass whose fields are the tier's options. Its method `open` returns a `Store`.
Does not depend on: texts, requests, the layout of K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retain.kv.stores.span import UNKNOWN_FORMAT, SpanFormat
from retain.kv.stores.store import Store
from retain.plugins import load_plugin, parse_spec, plugin_names


class Tier(Protocol):
    """The options of a storage tier, which open its store."""

    def of_rank(self, rank: int, size: int) -> Tier:
        """Return the tier of one of several ranks, whose spans are of its own heads."""

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> Store:
        """Open the store for spans of a format. Raises ValueError if it must not be used, OSError if it cannot be."""


def names() -> list[str]:
    """Return the names of all tiers."""
    return plugin_names(__name__)


def parse_all(specs: Sequence[str]) -> list[Tier]:
    """Parse the specs of several tiers, of different names. Raises ValueError."""
    named = [parse_spec(spec)[0] for spec in specs]
    if repeated := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"tier {repeated[0]!r} is named twice: give one of each")
    return [parse(spec) for spec in specs]


def parse(spec: str) -> Tier:
    """Parse the spec of a tier. Raises ValueError with the allowed names and options."""
    tier: Tier = load_plugin(__name__, "Tier", "tier", spec)
    return tier
