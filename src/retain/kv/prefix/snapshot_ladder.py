"""Where long texts keep snapshots, besides at their ends and where texts part."""

from __future__ import annotations

from dataclasses import dataclass

NUM_DENSE = 8  # intervals before the end of a text in which no rung is left out


@dataclass(frozen=True)
class SnapshotLadder:
    """Multiples of `interval` tokens, fewer of them the further they lie behind the end of a text. 0: none.

    Of the rungs that lie 8 intervals back every second one stays, then every fourth from 16 on, and so on: their number
    grows with the logarithm of the length.
    """

    interval: int

    def crossed(self, begin: int, end: int) -> range:
        """Return the rungs after position `begin`, up to `end`."""
        if not self.interval:
            return range(0)
        return range(begin // self.interval * self.interval + self.interval, end + 1, self.interval)

    def has(self, position: int, reach: int = 0) -> bool:
        """Return whether a position is a rung, or was one, or stands for one of the next `reach` tokens."""
        return len(self.crossed(position - 1, position + reach)) > 0

    def keeps(self, position: int, length: int, reach: int = 0) -> bool:
        """Return whether a text of `length` tokens keeps a snapshot at a position. `reach` as in `has`."""
        rungs = self.crossed(position - 1, position + reach)
        if not rungs:
            return False
        num_behind = max(length - rungs[0], 0) // self.interval
        stride = 1 << (num_behind // NUM_DENSE).bit_length()
        return rungs[0] // self.interval % stride == 0
