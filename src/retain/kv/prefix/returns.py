"""When texts are asked for again: what agents say, and what was learned of the pauses behind their calls.

An agent's text goes on when its tool has ended. How long a tool takes is learned by a label, such as the key and the
tool's name. As in Continuum (arXiv 2511.02230), a text is then worth keeping by what it costs to compute again and by
how soon it is back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

MAX_LABELS = 4096
MAX_PAUSES = 64  # of a label, the latest
MIN_PAUSES = 4  # before a label says anything
MAX_LEFT = 4096  # texts that wait for their return


@dataclass(frozen=True)
class ExpectedReturn:
    """A text that was left at a time, in seconds, and pauses that texts like it took."""

    left_at: float
    pauses: Sequence[float]

    def remaining(self, now: float) -> float:
        """Return how many seconds it takes on from now, in the mean of the pauses that are longer than it took so far.

        Where none is, the longer it is overdue the later it is expected.
        """
        elapsed = now - self.left_at
        longer = [pause - elapsed for pause in self.pauses if pause > elapsed]
        return sum(longer) / len(longer) if longer else elapsed - max(self.pauses)


NEVER = ExpectedReturn(0.0, (inf,))


class ReturnTimes:
    """Pauses by label, and the texts that were left, by the hash of their last whole block."""

    def __init__(self) -> None:
        self.pauses: OrderedDict[str, deque[float]] = OrderedDict()  # the label that was used last comes last
        self._left: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def leave(self, block_hash: bytes, now: float, label: str, seconds: float | None = None) -> ExpectedReturn | None:
        """Return when a text is back that is left now: after `seconds`, or as its label says. None: nobody knows.

        A label learns of the return; without one nothing is learned.
        """
        if label:
            self._left[block_hash] = (now, label)
            self._left.move_to_end(block_hash)
            while len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)
        if seconds is not None:
            return ExpectedReturn(now, (seconds,))
        known = self.pauses.get(label, ())
        return ExpectedReturn(now, tuple(known)) if len(known) >= MIN_PAUSES else None

    def come_back(self, block_hashes: Sequence[bytes], now: float) -> None:
        """Learn from a text with these blocks: the longest text that it goes on from is back."""
        for block_hash in reversed(block_hashes) if self._left else ():
            if found := self._left.pop(block_hash, None):
                left_at, label = found
                self.pauses.setdefault(label, deque(maxlen=MAX_PAUSES)).append(now - left_at)
                self.pauses.move_to_end(label)
                while len(self.pauses) > MAX_LABELS:
                    self.pauses.popitem(last=False)
                return
