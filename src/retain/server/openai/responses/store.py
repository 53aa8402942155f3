"""A bounded store of responses: what previous_response_id, references to items and GET /v1/responses/{id} find again.

A stored turn is a response with its items, those that it answers and its own, and a link to the turn before it. The
turns of one conversation share their history, so a long conversation costs each of its bytes once. A turn stays as
long as its id is known or a later turn continues it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TURN_OVERHEAD = 768  # bytes of a turn's Python objects, about
ITEM_OVERHEAD = 384  # and of an item's, with the entry by which it is found


class StoredItem(NamedTuple):
    """An item as JSON. `num_values`: in all its lists and objects."""

    id: str
    encoded: bytes
    num_values: int


@dataclass(frozen=True)
class ItemTotals:
    """How much some items are: their number, the values in them, and the bytes of their JSON."""

    num_items: int = 0
    num_values: int = 0
    num_bytes: int = 0

    def __add__(self, other: ItemTotals) -> ItemTotals:
        return ItemTotals(
            self.num_items + other.num_items,
            self.num_values + other.num_values,
            self.num_bytes + other.num_bytes,
        )


def count_items(items: Iterable[StoredItem]) -> ItemTotals:
    """Return how much these items are."""
    sizes = [(item.num_values, len(item.encoded)) for item in items]
    return ItemTotals(len(sizes), sum(values for values, _ in sizes), sum(size for _, size in sizes))


@dataclass(eq=False)
class StoredTurn:
    """A response as JSON, and its items: those that it answers come first. `previous`: the turn that it continues.

    `conversation_totals` are of all items up to this turn's last. A turn without items counts as one, so that they
    bound the number of turns too.
    """

    response: bytes
    items: Sequence[StoredItem] = ()
    num_input_items: int = 0
    previous: StoredTurn | None = None
    num_bytes: int = field(init=False)
    num_conversation_bytes: int = field(init=False)
    conversation_totals: ItemTotals = field(init=False)
    num_references: int = field(init=False, default=0)  # its id, and the turns that continue it

    def __post_init__(self) -> None:
        own = count_items(self.items)
        self.num_bytes = TURN_OVERHEAD + ITEM_OVERHEAD * len(self.items) + len(self.response) + own.num_bytes
        self.num_bytes += sum(len(item.id) for item in self.items)  # of any length, and kept twice
        self.num_conversation_bytes = self.num_bytes
        self.conversation_totals = own if self.items else ItemTotals(1)
        if self.previous:
            self.num_conversation_bytes += self.previous.num_conversation_bytes
            self.conversation_totals += self.previous.conversation_totals

    def iter_backwards(self) -> Iterator[StoredTurn]:
        """Yield the turns of the conversation, from this one to the first."""
        turn: StoredTurn | None = self
        while turn:
            yield turn
            turn = turn.previous

    def iter_items(self) -> Iterator[StoredItem]:
        """Yield the items of the conversation, oldest first."""
        for turn in reversed(list(self.iter_backwards())):
            yield from turn.items

    def iter_input_items(self, newest_first: bool) -> Iterator[StoredItem]:
        """Yield the items that this response answers. The iterator goes only as far as it is read."""
        inputs = self.items[: self.num_input_items]
        if not newest_first:
            if self.previous:
                yield from self.previous.iter_items()
            yield from inputs
            return
        yield from reversed(inputs)
        for turn in self.previous.iter_backwards() if self.previous else ():
            yield from reversed(turn.items)


class ResponseStore:
    """Stores responses by API key and id, in at most `max_bytes`. Used from the event loop only.

    When space runs out, the key with the most bytes loses the response that it has not used for longest. So a key that
    holds less than an equal share never loses anything to another key.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes_by_key: Counter[str] = Counter()
        self._turns_by_key: defaultdict[str, OrderedDict[str, StoredTurn]] = defaultdict(OrderedDict)
        self._items: dict[tuple[str, str], StoredItem] = {}  # by key and id, the newest

    @property
    def num_bytes(self) -> int:
        """The bytes of all stored turns."""
        return self.num_bytes_by_key.total()

    def get(self, key_name: str, response_id: str) -> StoredTurn | None:
        """Return a response of a key and mark it as used, or None if the key has no such response."""
        turns = self._turns_by_key.get(key_name)
        if not turns or response_id not in turns:
            return None
        turns.move_to_end(response_id)
        return turns[response_id]

    def find_item(self, key_name: str, item_id: str) -> StoredItem | None:
        """Return the newest item of a key with this id, or None."""
        return self._items.get((key_name, item_id))

    def put(self, key_name: str, response_id: str, turn: StoredTurn) -> None:
        """Store a response, and evict others as necessary. A conversation larger than the store is not stored."""
        if turn.num_conversation_bytes > self.max_bytes:
            return
        self._turns_by_key[key_name][response_id] = turn
        self._add_reference(key_name, turn)
        while self.num_bytes > self.max_bytes:
            ((largest, _),) = self.num_bytes_by_key.most_common(1)
            self.delete(largest, next(iter(self._turns_by_key[largest])))

    def delete(self, key_name: str, response_id: str) -> bool:
        """Forget a response of a key. Returns whether there was one. Turns that continue it keep its content."""
        turns = self._turns_by_key.get(key_name)
        if not turns or response_id not in turns:
            return False
        self._remove_reference(key_name, turns.pop(response_id))
        if not turns:
            del self._turns_by_key[key_name], self.num_bytes_by_key[key_name]
        return True

    def _add_reference(self, key_name: str, turn: StoredTurn | None) -> None:
        """Count a reference. A turn that had none, and so was not stored, references the one before it."""
        while turn:
            turn.num_references += 1
            if turn.num_references > 1:
                return
            self.num_bytes_by_key[key_name] += turn.num_bytes
            self._items |= {(key_name, item.id): item for item in turn.items}
            turn = turn.previous

    def _remove_reference(self, key_name: str, turn: StoredTurn | None) -> None:
        while turn:
            turn.num_references -= 1
            if turn.num_references:
                return
            self.num_bytes_by_key[key_name] -= turn.num_bytes
            for item in turn.items:
                if self._items.get((key_name, item.id)) is item:
                    del self._items[key_name, item.id]
            turn = turn.previous
