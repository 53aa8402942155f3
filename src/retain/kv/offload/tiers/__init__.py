"""Tiers: where pages sleep that the pool has no room for, or that shall outlive the process. One tier is one file here,
found by its name: `parse("disk:path=store,capacity=50GiB")`.

A file defines `class Tier`, a frozen dataclass whose fields are its options on the command line, with `open()`, which
gives a `Store`. What is not known here: texts, requests, what K and V look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retain.kv.offload.span import Store
from retain.plugins import load_plugin, parse_spec, plugin_names


class Tier(Protocol):
    """What can be chosen of a tier."""

    def open(self) -> Store:
        """The store. Raises ValueError where it cannot be used, OSError where it cannot be reached."""
        ...


def names() -> list[str]:
    """The tiers in this folder."""
    return plugin_names(__name__)


def parse_all(specs: Sequence[str]) -> list[Tier]:
    """The tiers that these texts name, one of each. Raises ValueError."""
    named = [parse_spec(text)[0] for text in specs]
    if twice := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"tier {twice[0]!r} is named twice: give one of each")
    return [parse(text) for text in specs]


def parse(spec: str) -> Tier:
    """The tier that a text names. Raises ValueError with what is allowed."""
    tier: Tier = load_plugin(__name__, "Tier", "tier", spec)
    return tier
