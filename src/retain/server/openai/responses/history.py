"""What a request refers to: the stored turns that it continues, and single stored items, within the bounds of a body.

A short request may name a long conversation. What that costs is known from counts that are kept with each turn, so it
is refused before anything of it is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import orjson
from pydantic import TypeAdapter

from retain.server.exact_json import parse_json, write_json
from retain.server.openai.body import MAX_ITEMS, MAX_VALUES, count_values
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import Json
from retain.server.openai.responses.items import InputItem, ItemReference, dump_item
from retain.server.openai.responses.store import ItemTotals, ResponseStore, StoredItem, StoredTurn, count_items

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True)
class Conversation:
    """The items of a request, and what they refer to. `referenced`: stored items, by their ids."""

    items: Sequence[InputItem]
    previous: StoredTurn | None = None
    referenced: Mapping[str, StoredItem] = field(default_factory=dict)

    def load_history(self) -> list[InputItem]:
        """Return the items of the stored turns that the request continues, oldest first."""
        return load_items(self.previous.iter_items()) if self.previous else []

    def load_input(self) -> list[InputItem]:
        """Return the request's own items, with stored ones in place of references to them."""
        stored = dict(zip(self.referenced, load_items(self.referenced.values()), strict=True))
        return [stored[item.id] if isinstance(item, ItemReference) else item for item in self.items]

    def measure(self) -> ItemTotals:
        """Return how much the request refers to, with the number of its own items: its body is bounded by itself."""
        references = [self.referenced[item.id] for item in self.items if isinstance(item, ItemReference)]
        totals = count_items(references) + ItemTotals(len(self.items) - len(references))
        return totals + self.previous.conversation_totals if self.previous else totals


def find_conversation(
    store: ResponseStore, key_name: str, items: Sequence[InputItem], previous_id: str | None
) -> Conversation:
    """Look up what a request refers to. Raises APIError if a key has no such response or item.

    `items`: those of the request. `previous_id`: of the response that it continues.
    """
    previous = store.get(key_name, previous_id) if previous_id else None
    if previous_id and not previous:
        message = "previous response not found: it was never stored, deleted, or evicted; send the whole conversation"
        raise APIError(400, message, "previous_response_id", "previous_response_not_found")
    referenced = {}
    for item in items:
        if isinstance(item, ItemReference):
            found = store.find_item(key_name, item.id)
            if not found:
                message = "item not found: its response was never stored, deleted, or evicted; send the item"
                raise APIError(400, message, "input", "item_not_found")
            referenced[item.id] = found
    return Conversation(items, previous, referenced)


def check_length(conversation: Conversation, max_bytes: int) -> None:
    """Raise APIError for a conversation that no body could have: what is stored has the bounds of what is sent.

    `max_bytes`: of a body. The code is the one at which agents shorten a conversation.
    """
    totals = conversation.measure()
    for number, most, things in (
        (totals.num_items, MAX_ITEMS, "items"),
        (totals.num_values, MAX_VALUES, "values"),
        (totals.num_bytes, max_bytes, "bytes"),
    ):
        if number > most:
            message = (
                f"the conversation is too long: it has {number} {things} with what is stored of it, at most {most}; "
                "send a shorter one"
            )
            param = "previous_response_id" if conversation.previous else "input"
            raise APIError(400, message, param, "context_length_exceeded")


def load_items(items: Iterable[StoredItem]) -> list[InputItem]:
    """Return stored items as those of a request."""
    return ITEMS.validate_python(parse_json(b"[%b]" % b",".join(item.encoded for item in items)))


def encode_items(items: Iterable[InputItem]) -> list[StoredItem]:
    """Return items of a request as the store keeps them. Those without an id get one."""
    return [_encode_item(dump_item(item)) for item in items]


def build_turn(
    inputs: Sequence[StoredItem], output: Sequence[Json], encoded: bytes, previous: StoredTurn | None
) -> StoredTurn:
    """Return what the store keeps of a response, its JSON, with the items that it answers and those of its output."""
    items = [*inputs, *(_encode_item(_without_logprobs(item)) for item in output)]
    return StoredTurn(_copy(encoded), items, len(inputs), previous)


def encode_page(turn: StoredTurn, newest_first: bool, after: str | None, limit: int) -> bytes:
    """Return the JSON of a list of items that a response answers (ItemList). Raises APIError for an unknown `after`."""
    items = turn.iter_input_items(newest_first)
    if after is not None and not _skip_past(items, after):
        raise APIError(400, "after: no item has this id", "after")
    page = list(islice(items, limit + 1))
    shown = page[:limit]
    return write_json(
        {
            "object": "list",
            "data": [orjson.Fragment(item.encoded) for item in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(page) > limit,
        }
    )


def _skip_past(items: Iterator[StoredItem], item_id: str) -> bool:
    """Advance an iterator past the item with this id. Returns whether there is one."""
    return any(item.id == item_id for item in items)


def _encode_item(dumped: Json) -> StoredItem:
    return StoredItem(dumped["id"], _copy(write_json(dumped)), count_values(dumped))


def _without_logprobs(item: Json) -> Json:
    """Return an item of an output as the model sees it again: log-probabilities are hundreds of times its text."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _copy(data: bytes) -> bytes:
    """Return a copy that has its own size in memory: the JSON writer's buffers have at least 4 KiB."""
    return bytes(memoryview(data))
