"""The pages that sliding-window layers hold at one position of a text."""

from __future__ import annotations

from dataclasses import dataclass

from retain.types import Ints


@dataclass(frozen=True)
class SlidingWindows:
    """Pages of the sliding layers, for each layer [G, n] from page `first_pages` of the text on.

    Only texts that continue at `min_resume_position` or later can use them: older slots may be overwritten.
    """

    first_pages: tuple[int, ...]
    pages: tuple[Ints, ...]
    min_resume_position: int
