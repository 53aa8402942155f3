"""What two sequences have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


def count_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
