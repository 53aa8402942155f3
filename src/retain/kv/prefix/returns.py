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

MAX_LABELS = 1024  # of an owner
MAX_PAUSES = 64  # of a label, the latest
MIN_PAUSES = 4  # before a label says anything
MAX_LEFT = 1024  # texts of an owner that wait for their return


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


class OwnReturns:
    """Pauses of one owner by label, and the texts that were left, by the hash of their last whole block."""

    def __init__(self) -> None:
        self.pauses: OrderedDict[str, deque[float]] = OrderedDict()  # the label that was used last comes last
        self.left: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def leave(self, block_hash: bytes, now: float, label: str) -> None:
        """Remember that a text is left now."""
        self.left[block_hash] = (now, label)
        self.left.move_to_end(block_hash)
        if len(self.left) > MAX_LEFT:
            self.left.popitem(last=False)

    def come_back(self, block_hashes: Sequence[bytes], now: float) -> None:
        """Learn from a text with these blocks: the longest text that it goes on from is back."""
        for block_hash in reversed(block_hashes) if self.left else ():
            if found := self.left.pop(block_hash, None):
                left_at, label = found
                self.pauses.setdefault(label, deque(maxlen=MAX_PAUSES)).append(now - left_at)
                self.pauses.move_to_end(label)
                if len(self.pauses) > MAX_LABELS:
                    self.pauses.popitem(last=False)
                return


class ReturnTimes:
    """What was learned of each owner: the part of a label before a slash. None takes the place of another's."""

    def __init__(self) -> None:
        self.owners: dict[str, OwnReturns] = {}

    def leave(self, block_hash: bytes, now: float, label: str, seconds: float | None = None) -> ExpectedReturn | None:
        """Return when a text is back that is left now: after `seconds`, or as its label says. None: nobody knows.

        A label learns of the return; without one nothing is learned.
        """
        known: Sequence[float] = ()
        if label:
            own = self.owners.setdefault(label.partition("/")[0], OwnReturns())
            own.leave(block_hash, now, label)
            known = tuple(own.pauses.get(label, ()))
        if seconds is not None:
            return ExpectedReturn(now, (seconds,))
        return ExpectedReturn(now, known) if len(known) >= MIN_PAUSES else None

    def come_back(self, block_hashes: Sequence[bytes], now: float) -> None:
        """Learn from a text with these blocks, which goes on from one that was left."""
        for own in self.owners.values():
            own.come_back(block_hashes, now)
