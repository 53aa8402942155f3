"""Where long texts keep checkpoints, besides at their ends and where texts part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

FIRST_RUNG = 256  # tokens; a text shorter than the interval has rungs there, at twice as many, and so on
NUM_DENSE = 8  # intervals before the end of a text in which no rung is left out


@dataclass(frozen=True)
class CheckpointLadder:
    """Choose the positions of a text that keep a checkpoint: multiples of `interval`, ever fewer towards its start.

    Of the rungs that lie 8 intervals back every second one stays, then every fourth from 16 on, and so on: their number
    grows with the logarithm of the length. Before the first multiple there are rungs at 256, 512, 1,024, and so on,
    for texts that are shorter. They go when 8 intervals lie behind them. All rungs are multiples of `block_size`.
    """

    interval: int
    block_size: int = 1

    @cached_property
    def first_rungs(self) -> list[int]:
        """The rungs before the first multiple of the interval, ascending."""
        num_doubled = max((self.interval - 1) // FIRST_RUNG, 0).bit_length()
        rungs = {-(-(FIRST_RUNG << i) // self.block_size) * self.block_size for i in range(num_doubled)}
        return sorted(rung for rung in rungs if rung < self.interval)

    def crossed(self, begin: int, end: int) -> Sequence[int]:
        """Return the rungs after position `begin`, up to `end`."""
        if not self.interval:
            return range(0)
        multiples = range(begin // self.interval * self.interval + self.interval, end + 1, self.interval)
        if begin >= self.interval:
            return multiples
        first = [rung for rung in self.first_rungs if begin < rung <= end]
        return [*first, *multiples] if first else multiples

    def has(self, position: int, reach: int = 0) -> bool:
        """Return whether a position is a rung, or was one, or stands for one of the next `reach` tokens."""
        return len(self.crossed(position - 1, position + reach)) > 0

    def keeps(self, position: int, length: int, reach: int = 0) -> bool:
        """Return whether a text of `length` tokens keeps a checkpoint at a position. `reach` as in `has`."""
        rungs = self.crossed(position - 1, position + reach)
        if not rungs:
            return False
        is_first = rungs[0] < self.interval
        num_behind = max(length - rungs[0], 0) // self.interval
        stride = 1 << (num_behind // NUM_DENSE).bit_length()
        return stride == 1 if is_first else rungs[0] // self.interval % stride == 0
