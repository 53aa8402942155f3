"""A queue for places that API keys share: no key holds more than its share, and keys take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Ticket:
    """A wait for a place, and then the place. `on_place` is called when it becomes one."""

    key_name: str
    on_place: Callable[[], object]
    has_place: bool = False


class FairQueue:
    """Gives `num_places` places to those who wait, at most `places_per_key` of them to one key.

    A key's own waits are served in their order. Of the keys that wait and hold less than their share, the one whose
    last turn is longest ago is next (round robin). Not thread-safe: an event loop owns a queue.
    """

    def __init__(self, num_places: int, places_per_key: int):
        self.num_places = num_places
        self.places_per_key = places_per_key
        self._num_held: Counter[str] = Counter()  # places, by key
        self._waiting: dict[str, dict[Ticket, None]] = {}  # by key, the next turn first; in order of arrival

    def enter(self, key_name: str, on_place: Callable[[], object]) -> Ticket:
        """Wait for a place. It may be given at once; whoever enters must leave once."""
        ticket = Ticket(key_name, on_place)
        self._waiting.setdefault(key_name, {})[ticket] = None
        self._give_places()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give a place back, or wait no more. Leaving again changes nothing."""
        if ticket.has_place:
            ticket.has_place = False
            self._num_held[ticket.key_name] -= 1
            self._num_held += Counter()  # forget keys that hold none
            self._give_places()
        elif ticket in self._waiting.get(ticket.key_name, ()):
            del self._waiting[ticket.key_name][ticket]
            if not self._waiting[ticket.key_name]:
                del self._waiting[ticket.key_name]

    def _give_places(self) -> None:
        while (key_name := self._next_key()) is not None:
            tickets = self._waiting.pop(key_name)
            ticket = next(iter(tickets))
            del tickets[ticket]
            if tickets:
                self._waiting[key_name] = tickets  # behind all others
            self._num_held[key_name] += 1
            ticket.has_place = True
            ticket.on_place()

    def _next_key(self) -> str | None:
        """Return the key whose turn it is; None where no place is free, or nobody may have one."""
        if self._num_held.total() == self.num_places:
            return None
        return next((key for key in self._waiting if self._num_held[key] < self.places_per_key), None)
