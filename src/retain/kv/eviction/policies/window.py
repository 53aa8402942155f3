"""window: keep the newest tokens. The tokens of `ring`, found by priority instead of in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from retain.kv.eviction.budget import PositionPolicy


@dataclass(frozen=True, kw_only=True)
class Policy(PositionPolicy):
    """Keep the newest tokens."""
