"""sinks: keep the first tokens, to which every head attends, and the newest (StreamingLLM, arXiv 2309.17453).

Positions stay those of the text: no text is longer than the model's context.
"""

from __future__ import annotations

from dataclasses import dataclass

from retain.kv.eviction.budget import PositionPolicy
from retain.options import NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class Policy(PositionPolicy):
    """Keep attention sinks and the newest tokens."""

    sinks: NonNegativeInt = 4
