"""Stored conversations: what is stored has the bounds of what is sent, and its pages cost no more than they show."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.server.launch import GracefulServer
from retain.server.openai.body import MAX_ITEMS, MAX_VALUES
from retain.server.openai.errors import APIError
from retain.server.openai.responses import routes
from retain.server.openai.responses.history import (
    ITEMS,
    Conversation,
    build_turn,
    check_length,
    encode_items,
    encode_page,
)
from retain.server.openai.responses.store import ItemTotals, StoredItem, StoredTurn, count_items
from tests.server.conftest import HTTP, application_of

Json = dict[str, Any]
MAX_BYTES = 10_000_000
SIZE = st.tuples(st.integers(0, 9), st.integers(2, 99))
LEFT_OUT = {"type": "compaction"}  # an item that adds nothing to the prompt


def build_chain(turns: Sequence[Sequence[tuple[int, int]]]) -> StoredTurn | None:
    """Return the last of turns with items of these numbers of values and bytes."""
    last = None
    for i, sizes in enumerate(turns):
        items = [StoredItem(f"item_{i}_{j}", b" " * size, values) for j, (values, size) in enumerate(sizes)]
        last = StoredTurn(b"{}", items, len(items), last)
    return last


@given(st.lists(st.lists(SIZE, max_size=4), min_size=1, max_size=5), st.lists(st.integers(0, 3), max_size=4))
def test_all_that_a_request_refers_to_counts(turns: list[list[tuple[int, int]]], references: list[int]) -> None:
    """An item that is referenced twice counts twice, and a turn without items as one item."""
    previous = build_chain(turns)
    items = [StoredItem(f"x{i}", b" " * i, i) for i in range(4)]
    own: list[Any] = [{"type": "item_reference", "id": f"x{i}"} for i in references]
    own += [{"role": "user", "content": "x"}] * 2
    conversation = Conversation(ITEMS.validate_python(own), previous, {item.id: item for item in items})
    stored = list(previous.iter_items()) if previous else []
    empty = ItemTotals(sum(not sizes for sizes in turns) + 2)
    assert conversation.measure() == count_items([*stored, *(items[i] for i in references)]) + empty


@pytest.mark.parametrize(
    ("item", "number", "things"),
    [
        (StoredItem("i", b"x", 1), MAX_ITEMS, "items"),
        (StoredItem("i", b"x", MAX_VALUES // 4), 4, "values"),
        (StoredItem("i", b"x" * (MAX_BYTES // 4), 1), 4, "bytes"),
    ],
)
def test_a_conversation_has_the_bounds_of_a_body(item: StoredItem, number: int, things: str) -> None:
    fits, exceeds = (StoredTurn(b"{}", [item] * n, n) for n in (number, number + 1))
    check_length(Conversation([], fits), MAX_BYTES)
    with pytest.raises(APIError, match=f"the conversation is too long: it has .* {things}") as raised:
        check_length(Conversation([], exceeds), MAX_BYTES)
    assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
    references = ITEMS.validate_python([{"type": "item_reference", "id": "i"}] * (number + 1))
    with pytest.raises(APIError, match=f"the conversation is too long: it has .* {things}"):
        check_length(Conversation(references, None, {"i": item}), MAX_BYTES)


def ask(server: GracefulServer, items: list[Json] | str, path: str = "responses", **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "input": items, "max_output_tokens": 1, **fields}
    return HTTP.post(f"{server.url}/{path}", json=body)


@pytest.mark.parametrize("path", ["responses", "responses/render"])
def test_a_long_conversation_is_refused_before_it_is_read(
    path: str, tiny_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = [{"role": "user", "content": "x"}, *[LEFT_OUT] * (MAX_ITEMS // 2)]
    first = ask(tiny_server, half)
    assert first.status_code == 200

    def fail(self: Conversation) -> NoReturn:
        raise AssertionError("read")

    monkeypatch.setattr(Conversation, "load_history", fail)
    monkeypatch.setattr(Conversation, "load_input", fail)
    first_id = first.json()["id"]
    last_item = first.json()["output"][0]["id"]
    for items in (half, [{"type": "item_reference", "id": last_item}] * (MAX_ITEMS // 2)):
        refused = ask(tiny_server, items, path, previous_response_id=first_id)
        assert refused.status_code == 400 and "the conversation is too long" in refused.json()["error"]["message"]
    if path == "responses":
        streamed = ask(tiny_server, half, previous_response_id=first_id, stream=True)
        assert streamed.status_code == 200 and "the conversation is too long" in streamed.text


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=5), st.integers(1, 4))
def test_pages_are_the_whole_list(turns: list[tuple[int, int]], limit: int) -> None:
    """In both orders, from any page to the next."""
    last = None
    for i, (num_inputs, num_outputs) in enumerate(turns):
        inputs = [{"role": "user", "content": "x", "id": f"in_{i}_{j}"} for j in range(num_inputs)]
        output: list[Json] = [{"type": "reasoning", "id": f"out_{i}_{j}"} for j in range(num_outputs)]
        last = build_turn(encode_items(ITEMS.validate_python(inputs)), output, b"{}", last)
    assert last
    whole = [item.id for item in last.iter_items()]
    whole = whole[: len(whole) - turns[-1][1]]
    for newest_first in (False, True):
        found: list[str] = []
        has_more = True
        while has_more:
            page = orjson.loads(encode_page(last, newest_first, found[-1] if found else None, limit))
            ids = [item["id"] for item in page["data"]]
            assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            assert len(ids) == limit or not page["has_more"]
            found = [*found, *ids]
            has_more = page["has_more"]
        assert found == (whole[::-1] if newest_first else whole)


def test_the_newest_page_reads_no_older_turn() -> None:
    class Unread(Sequence[StoredItem]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: Any) -> NoReturn:
            raise AssertionError("read")

    older = StoredTurn(b"{}")
    older.items = Unread()
    newest = build_turn(encode_items(ITEMS.validate_python([LEFT_OUT] * 3)), [], b"{}", older)
    assert orjson.loads(encode_page(newest, True, None, 2))["has_more"]
    assert orjson.loads(encode_page(newest, True, newest.items[2].id, 1))["has_more"]


def test_log_probabilities_are_no_part_of_a_conversation() -> None:
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [{"token": "x"}] * 100}
    turn = build_turn([], [{"type": "message", "id": "m", "role": "assistant", "content": [part]}], b"{}", None)
    assert orjson.loads(turn.items[0].encoded)["content"] == [{**part, "logprobs": []}]


def test_what_is_stored_is_read_as_other_work_is_done(
    tiny_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admitted, and a page is written in a thread."""
    threads: list[str] = []

    def record(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode_page(*arguments)

    monkeypatch.setattr(routes, "encode_page", record)
    root = f"{tiny_server.url}/responses/{ask(tiny_server, 'x').json()['id']}"
    calls = [("GET", "/input_items"), ("GET", ""), ("DELETE", "")]
    with monkeypatch.context() as patch:
        patch.setattr(tiny_server.service.admission, "closed", True)
        assert [HTTP.request(method, root + path).status_code for method, path in calls] == [503] * 3
    assert [HTTP.request(method, root + path).status_code for method, path in calls] == [200] * 3
    assert len(threads) == 1 and threads[0].startswith("retain-prepare")


def test_the_event_loop_writes_no_json_as_long_as_what_a_client_sent(tiny_server: GracefulServer) -> None:
    """The framework writes the models that a route returns, in the event loop: these have a fixed length."""
    app = application_of(tiny_server)
    included = [getattr(route, "original_router", None) for route in app.routes]
    found = [*app.routes, *(route for router in included if router for route in router.routes)]
    models = {model.__name__ for route in found if (model := getattr(route, "response_model", None))}
    assert models == {"ModelList", "ModelCard", "TokenizerInfo", "TokenCount", "DeletedResponse", "CacheHintResponse"}
