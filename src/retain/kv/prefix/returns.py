"""When texts are asked for again: what agents say, and what was learned of the pauses behind their calls.

An agent's text goes on when its tool has ended. How long a tool takes is learned by its owner, an API key, and by its
name. As in Continuum (arXiv 2511.02230), a text is then worth keeping by what it costs to compute again and by
how soon it is back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

MAX_TOOLS = 1024  # of an owner
MAX_PAUSES = 64  # of a tool, the latest
MIN_PAUSES = 4  # before a tool says anything
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


class ToolPauses:
    """The pauses of one owner by tool, and the texts that wait for one, by the hash of their last whole block."""

    def __init__(self) -> None:
        self.pauses: OrderedDict[str, deque[float]] = OrderedDict()  # the tool that was used last comes last
        self.left: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def record(self, tool: str, seconds: float) -> None:
        """Learn how long a tool took."""
        self.pauses.setdefault(tool, deque(maxlen=MAX_PAUSES)).append(seconds)
        self.pauses.move_to_end(tool)
        if len(self.pauses) > MAX_TOOLS:
            self.pauses.popitem(last=False)


class ReturnTimes:
    """What was learned of each owner. Nothing takes the place of what was learned of another."""

    def __init__(self) -> None:
        self.owners: dict[str, ToolPauses] = {}
        self._owner_of: dict[bytes, str] = {}  # of texts that were left

    def leave(
        self, block_hash: bytes, now: float, owner: str, tool: str | None, seconds: float | None = None
    ) -> ExpectedReturn | None:
        """Return when a text is back that is left now: after `seconds`, or as its tool says. None: nobody knows.

        A tool learns of the return; without one nothing is learned.
        """
        known: Sequence[float] = ()
        if tool is not None:
            own = self.owners.setdefault(owner, ToolPauses())
            own.left[block_hash] = (now, tool)
            own.left.move_to_end(block_hash)
            self._owner_of[block_hash] = owner
            if len(own.left) > MAX_LEFT:
                oldest, _ = own.left.popitem(last=False)
                self._owner_of.pop(oldest, None)
            known = tuple(own.pauses.get(tool, ()))
        if seconds is not None:
            return ExpectedReturn(now, (seconds,))
        return ExpectedReturn(now, known) if len(known) >= MIN_PAUSES else None

    def come_back(self, block_hashes: Sequence[bytes], now: float) -> None:
        """Learn from a text with these blocks: the longest text that it goes on from is back."""
        for block_hash in reversed(block_hashes) if self._owner_of else ():
            if (owner := self._owner_of.pop(block_hash, None)) is not None:
                left_at, tool = self.owners[owner].left.pop(block_hash)
                self.owners[owner].record(tool, now - left_at)
                return
