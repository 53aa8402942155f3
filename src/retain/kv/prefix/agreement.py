"""What ranks agree on where their stores, or their clocks, may differ: all load the same, or none loads."""

from __future__ import annotations

from typing import Protocol


class Agreement(Protocol):
    """How ranks agree. All ask in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank: the clocks of 0 count."""

    def is_shared(self, value: object) -> bool:
        """Return whether all ranks give this value; it can be pickled."""


class Alone:
    """The agreement of one rank."""

    rank = 0

    def is_shared(self, value: object) -> bool:
        """Return True."""
        return True
