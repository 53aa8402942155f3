"""suffix: draft what followed the longest earlier occurrence of the text's end, in the text and in recent answers.

After "SuffixDecoding" (Oliaro et al., arXiv 2411.04975). The paper walks suffix trees. Here an index of short n-grams
finds the places, which are then compared backwards: it is smaller, and forgets an old answer at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.request import Request
from retain.options import NonNegativeInt, PositiveFloat, PositiveInt, Probability, check_bounds

MAX_PLACES = 32  # of one n-gram that are compared, the latest ones
MAX_MATCH = 64  # longer matches count as equal


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """A position in a text; the n-gram of the index ends before it."""

    text: Sequence[int]
    position: int

    def match_length(self, tokens: Sequence[int]) -> int:
        """Return how many tokens before the position equal the end of `tokens`."""
        n = 0
        most = min(self.position, len(tokens), MAX_MATCH)
        while n < most and self.text[self.position - 1 - n] == tokens[-1 - n]:
            n += 1
        return n


@dataclass
class PlaceIndex:
    """The latest places of every n-gram in some texts."""

    n: int
    places: dict[tuple[int, ...], deque[Place]] = field(default_factory=dict)

    def add(self, text: Sequence[int], begin: int, end: int) -> None:
        """Add the positions begin .. end - 1 of a text."""
        for position in range(max(begin, self.n), end):
            n_gram = tuple(text[position - self.n : position])
            self.places.setdefault(n_gram, deque(maxlen=MAX_PLACES)).append(Place(text, position))

    def remove_oldest(self, text: Sequence[int]) -> None:
        """Remove all positions of the text that was added first."""
        for position in range(self.n, len(text)):
            n_gram = tuple(text[position - self.n : position])
            places = self.places.get(n_gram, deque())
            while places and places[0].text is text:
                places.popleft()
            if not places:
                self.places.pop(n_gram, None)

    def find(self, tokens: Sequence[int]) -> Iterable[Place]:
        """Return the places behind the n-gram that ends `tokens`, the oldest first."""
        return self.places.get(tuple(tokens[-self.n :]), ())


class RecentAnswers:
    """Answers of ended requests, found only by requests of the same salt. The oldest leave at `capacity` tokens."""

    def __init__(self, n: int, capacity: int):
        self.n = n
        self.capacity = capacity
        self.num_tokens = 0
        self._answers: deque[tuple[str, Sequence[int]]] = deque()
        self._indexes: dict[str, PlaceIndex] = {}  # by salt

    def add(self, salt: str, answer: Sequence[int]) -> None:
        """Remember an answer, and forget the oldest ones beyond the capacity."""
        if not self.n < len(answer) <= self.capacity:
            return
        self._indexes.setdefault(salt, PlaceIndex(self.n)).add(answer, self.n, len(answer))
        self._answers.append((salt, answer))
        self.num_tokens += len(answer)
        while self.num_tokens > self.capacity:
            oldest_salt, oldest = self._answers.popleft()
            self.num_tokens -= len(oldest)
            self._indexes[oldest_salt].remove_oldest(oldest)
            if not self._indexes[oldest_salt].places:
                del self._indexes[oldest_salt]

    def find(self, salt: str, tokens: Sequence[int]) -> Iterable[Place]:
        """Return the places in answers of this salt behind the n-gram that ends `tokens`."""
        index = self._indexes.get(salt)
        return index.find(tokens) if index else ()


@dataclass
class Drafter:
    """Draft from matches of at least `min` tokens: at most `factor` times as many as match.

    `probability`: draft as long as the product of the shares of places that agree is at least that.
    `memory`: tokens of recent answers to keep.
    """

    needs: ClassVar[DrafterNeeds] = DrafterNeeds()
    max_draft_tokens: ClassVar[int] = 24
    k: str = "auto"
    min: PositiveInt = 2
    factor: PositiveFloat = 2.0
    probability: Probability = 0.3
    memory: NonNegativeInt = 65536
    _indexes: WeakKeyDictionary[Request, PlaceIndex] = field(default_factory=WeakKeyDictionary, init=False)
    _num_indexed: WeakKeyDictionary[Request, int] = field(default_factory=WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        self.answers = RecentAnswers(self.min, self.memory)

    def attach(self, target: TargetModel) -> None:
        """Do nothing: drafts are copied from texts, so no model is needed."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of each request."""
        for request, limit in draft_limits:
            request.set_drafts(self._draft(request, limit))

    def remove_request(self, request: Request) -> None:
        """Drop the index of a request, and remember its answer."""
        self._indexes.pop(request, None)
        self._num_indexed.pop(request, None)
        self.answers.add(request.input.salt, request.output_tokens)

    def _draft(self, request: Request, limit: int) -> list[int]:
        tokens = request.tokens
        index = self._indexes.setdefault(request, PlaceIndex(self.min))
        index.add(tokens, self._num_indexed.get(request, 0), len(tokens))  # without the n-gram that ends the text
        self._num_indexed[request] = len(tokens)
        matches = [
            (p.match_length(tokens), p) for p in (*self.answers.find(request.input.salt, tokens), *index.find(tokens))
        ]
        longest = max((length for length, _ in matches), default=0)
        places = [place for length, place in reversed(matches) if length == longest]  # the latest first
        return extend(places, tokens, min(limit, max(1, int(self.factor * longest))), self.probability)


def extend(places: Sequence[Place], tokens: Sequence[int], limit: int, probability: float) -> list[int]:
    """Return at most `limit` tokens that most places agree on, as long as enough of them do.

    A place in `tokens` itself may continue with what was drafted: so a text that repeats is drafted beyond its end.
    """
    drafts: list[int] = []
    share = 1.0  # of the places, that continue with all drafts
    while len(drafts) < limit and places:
        following = [(token, p) for p in places if (token := _token_after(p, tokens, drafts)) is not None]
        counts = Counter(token for token, _ in following)  # of equal counts the first, so the latest, wins
        if not counts:
            break
        token, count = counts.most_common(1)[0]
        share *= count / len(places)
        if share < probability:
            break
        drafts.append(token)
        places = [p for following_token, p in following if following_token == token]
    return drafts


def _token_after(place: Place, tokens: Sequence[int], drafts: Sequence[int]) -> int | None:
    at = place.position + len(drafts)
    if at < len(place.text):
        return place.text[at]
    return drafts[at - len(tokens)] if place.text is tokens else None
