"""How many drafts are worth their time, by what steps and drafts took and how often they were right.

A step of n fresh tokens is modelled as a + b n seconds, fitted to the latest steps; a draft of all requests by one more
token costs d. A draft of request r is right with probability alpha_r, whatever its place. So with K_r drafts a round
gives sum of 1 + alpha_r + ... + alpha_r^K_r tokens in a + b (B + sum of K_r) + d max K_r seconds, and the best is
chosen; 0 is plain decoding. What is not known here: who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from retain.engine.request import Request

MEMORY = 0.96  # of a measurement after one more
EXPLORE = 24  # rounds at least from one that tries something else to the next
LOSS = 0.01  # of the time, at most, goes into tries
SURE = 1.03  # times plain's rate, from which drafts are believed to pay: less is lost in what measuring misses
ODD = 1.5  # times what was expected: a step that took longer was held up by somebody else


@dataclass
class Line:
    """The straight line through the latest points, in which older ones count less."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        for name, value in (("w", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, getattr(self, name) * MEMORY + value)

    def at(self, x: float) -> float:
        """Its height there; never falling. 0 where nothing is known."""
        if not self.w:
            return 0.0
        mean, spread = self.x / self.w, self.xx / self.w - (self.x / self.w) ** 2
        slope = (self.xy / self.w - mean * self.y / self.w) / spread if spread > 0.01 else 0.0
        return max(self.y / self.w + max(slope, 0.0) * (x - mean), 1e-9)


@dataclass
class Luck:
    """How often drafts are right; hopeful at first."""

    right: float = 1.5
    tried: float = 2.0

    def add(self, drafted: int, accepted: int) -> None:
        """One more round. What comes behind the first wrong one was never tried."""
        self.right = self.right * MEMORY + accepted
        self.tried = self.tried * MEMORY + min(accepted + 1, drafted)

    @property
    def alpha(self) -> float:
        """Of the next one."""
        return min(self.right / self.tried, 0.99)


@dataclass
class Pace:
    """Of one engine. `most`: drafts of a request in a round."""

    most: int
    steps: Line = field(default_factory=Line)  # seconds of fresh tokens
    drafts: Line = field(default_factory=Line)  # seconds of levels: 0 drafts are 0
    luck: WeakKeyDictionary[Request, Luck] = field(default_factory=WeakKeyDictionary)
    everyone: Luck = field(default_factory=Luck)  # what a new request is expected to have
    rounds: int = 0
    tries: int = 0  # rounds in which anything was drafted
    explores: int = EXPLORE

    def choose(self, asked: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """How many each shall draft, at most as many as there is room for."""
        if not asked:
            return []
        self.rounds += 1
        if self.rounds <= 2 or (self.rounds <= 16 and self.tries <= 3):  # too little is known
            first = 0 if self.rounds <= 2 else 1 + (self.tries > 1)
            return [(r, min(n, first)) for r, n in asked]
        room = [(r, min(n, self._worth(r))) for r, n in asked]
        best = max(range(self.most + 1), key=lambda k: self.rate(k, room) * (1 if k else SURE))
        if self.rounds >= self.explores:
            self.explores = self.rounds + self._patience(asked)
            other = 0 if best else 1
            return [(r, min(n, other)) for r, n in asked]
        return [(r, min(n, best)) for r, n in room]

    def took(self, fresh: int, seconds: float, levels: int, drafting: float) -> None:
        """A step of so many fresh tokens, before which so many levels were drafted in `drafting` seconds."""
        self.tries += levels > 0
        if levels and self.tries == 1:
            return  # everything is done for the first time
        expected = self.steps.at(fresh)
        self.steps.add(fresh, min(seconds, ODD * expected) if expected else seconds)
        if levels:
            self.drafts.add(1.0, drafting / levels)

    def saw(self, request: Request, drafted: int, accepted: int) -> None:
        """What became of its drafts."""
        if drafted:
            self._of(request).add(drafted, accepted)
            self.everyone.add(drafted, accepted)

    def rate(self, levels: int, asked: Sequence[tuple[Request, int]]) -> float:
        """Tokens a second that are expected, if each drafts so many, as far as it has room."""
        tokens, fresh, most = 0.0, len(asked), 0
        for request, room in asked:
            alpha, n = self._of(request).alpha, min(room, levels)
            tokens += (1 - alpha ** (n + 1)) / (1 - alpha)
            fresh, most = fresh + n, max(most, n)
        return tokens / max(self.steps.at(fresh) + self.drafts.at(1.0) * most, 1e-9)

    def _worth(self, request: Request) -> int:
        """Drafts of one request, until the next is likely wrong and only makes the step longer."""
        step, alpha, n = max(self.steps.at(1.0), 1e-9), self._of(request).alpha, 0
        price = (self.steps.at(2.0) - step) / step  # of a fresh token, in tokens that a step gives
        while n < self.most and alpha ** (n + 1) > price:
            n += 1
        return n

    def _patience(self, asked: Sequence[tuple[Request, int]]) -> int:
        """Rounds until something else is tried again: the more a try is expected to cost, the more."""
        plain, tried = self.rate(0, asked), self.rate(1, asked)
        lost = (
            max(plain / tried - 1, 0.0) * (self.steps.at(2.0 * len(asked)) + self.drafts.at(1.0)) * tried / len(asked)
        )
        return max(EXPLORE, int(lost / LOSS))

    def _of(self, request: Request) -> Luck:
        return self.luck.setdefault(request, Luck(2 * self.everyone.alpha, 2.0))
