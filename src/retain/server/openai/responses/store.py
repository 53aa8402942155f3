"""A bounded store of responses: what previous_response_id, references to items and GET /v1/responses/{id} find again.

A stored turn is a response with the input items that led to it, and a link to the turn before it. The turns of one
conversation share their history, so a long conversation costs each of its bytes once. A turn stays as long as its id
is known or a later turn continues it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

TURN_OVERHEAD = 512  # bytes of a turn's Python objects, about
ITEM_OVERHEAD = 256  # and of an item's id where it is found by it


@dataclass(eq=False)
class StoredTurn:
    """A response and its input items, both as JSON. `previous`: the turn that it continues. `item_ids`: of both."""

    response: bytes
    input_items: bytes
    previous: StoredTurn | None = None
    item_ids: Sequence[str] = ()
    num_bytes: int = field(init=False)
    num_conversation_bytes: int = field(init=False)
    num_references: int = field(init=False, default=0)  # its id, and the turns that continue it

    def __post_init__(self) -> None:
        self.num_bytes = TURN_OVERHEAD + ITEM_OVERHEAD * len(self.item_ids)
        self.num_bytes += len(self.response) + len(self.input_items)
        self.num_conversation_bytes = self.num_bytes + (self.previous.num_conversation_bytes if self.previous else 0)

    def conversation(self) -> list[StoredTurn]:
        """Return the turns from the first of the conversation to this one."""
        turns, turn = [], self
        while turn:
            turns.append(turn)
            turn = turn.previous  # type: ignore[assignment]
        return turns[::-1]


class ResponseStore:
    """Stores responses by API key and id, in at most `max_bytes`. Used from the event loop only.

    When space runs out, the key with the most bytes loses the response that it has not used for longest. So a key that
    holds less than an equal share never loses anything to another key.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes_by_key: Counter[str] = Counter()
        self._turns_by_key: defaultdict[str, OrderedDict[str, StoredTurn]] = defaultdict(OrderedDict)
        self._turns_by_item: dict[tuple[str, str], StoredTurn] = {}  # by key and item id, the newest

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

    def find_item(self, key_name: str, item_id: str) -> StoredTurn | None:
        """Return the newest turn of a key that has an item with this id, or None."""
        return self._turns_by_item.get((key_name, item_id))

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
            for item_id in turn.item_ids:
                self._turns_by_item[key_name, item_id] = turn
            turn = turn.previous

    def _remove_reference(self, key_name: str, turn: StoredTurn | None) -> None:
        while turn:
            turn.num_references -= 1
            if turn.num_references:
                return
            self.num_bytes_by_key[key_name] -= turn.num_bytes
            for item_id in turn.item_ids:
                if self._turns_by_item.get((key_name, item_id)) is turn:
                    del self._turns_by_item[key_name, item_id]
            turn = turn.previous
