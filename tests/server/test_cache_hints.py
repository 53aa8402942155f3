"""Hints over HTTP: each key speaks of its own texts, in routes and in requests of all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retain.server import engine_thread
from retain.server.auth import ApiKeys
from retain.server.launch import GracefulServer
from retain.server.warning_header import WARNING_HEADER
from tests.helpers.tiers import disk_spec
from tests.server.conftest import API_KEYS, HTTP, run_in_engine_thread, run_tiny_server, wait_until

TEXT = "All pages of a text lie in the pool, until others need them. " * 4
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GracefulServer]:
    options = {"tier": [disk_spec(tmp_path_factory.mktemp("store"))], "max_running_requests": 8}
    with run_tiny_server(engine_options=options, api_keys=ApiKeys(API_KEYS, ["ann"])) as server:
        yield server


def post(server: GracefulServer, route: str, key: str = "ann", **body: Any) -> Any:
    return HTTP.post(f"{server.url}/{route}", json=body, headers={"Authorization": f"Bearer {API_KEYS[key]}"})


def ask(server: GracefulServer, key: str = "ann", **body: Any) -> int:
    """Return how many tokens of the prompt were cached."""
    fields = {"model": "smollm2", "prompt": TEXT, "max_tokens": 4, "temperature": 0, **body}
    answer = post(server, "completions", key, **fields).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def hint(server: GracefulServer, action: str, key: str = "ann", **body: Any) -> int:
    prompt = {} if "messages" in body else {"prompt": TEXT}
    fields = {} if action == "reset" else {"model": "smollm2", **prompt}
    response = post(server, f"cache/{action}", key, **fields, **body)
    assert response.status_code == 200, response.json()
    answer = response.json()
    assert answer["object"] == "cache.hint" and answer["action"] == action
    return int(answer["tokens"])


def num_held(server: GracefulServer) -> int:
    """Return the tokens that the tree has pages of."""
    tree = server.service.llm.cache.prefix_cache.tree
    return run_in_engine_thread(server, lambda: sum(len(n.tokens) for n in tree.iter_nodes() if n.has_pages)).result(60)


@pytest.fixture(autouse=True)
def _empty(server: GracefulServer) -> None:
    hint(server, "reset", all_keys=True)
    assert num_held(server) == 0


def test_a_key_gives_up_and_brings_back_its_own_text(server: GracefulServer) -> None:
    assert [ask(server), ask(server, "bob")] == [0, 0]
    assert hint(server, "demote", "bob") > 200
    before = num_held(server)
    assert hint(server, "demote", "bob") == 0, "it is in the tier alone"
    assert hint(server, "prefetch", "bob", seconds=60) >= 192
    assert ask(server, "bob") >= 192 and num_held(server) > before
    assert hint(server, "release", "bob") > 200
    assert ask(server, "bob") == 0 and ask(server) > 200
    assert hint(server, "retain", seconds=60) > 200
    assert hint(server, "retain", seconds=0, cache_salt="other") == 0


def test_a_text_is_released_behind_tokens(server: GracefulServer) -> None:
    ask(server)
    assert hint(server, "release", num_kept_tokens=100) > 100
    assert 0 < ask(server) <= 128


def test_a_reset_is_of_a_key_a_salt_or_all(server: GracefulServer) -> None:
    def found() -> list[bool]:
        asked = [("ann", None), ("ann", "x"), ("bob", None)]
        return [ask(server, key, cache_salt=salt) > 0 for key, salt in asked]

    assert found() == [False] * 3
    hint(server, "reset", cache_salt="x")
    assert found() == [True, False, True]
    hint(server, "reset")
    assert found() == [False, False, True]
    assert found() == [True] * 3
    hint(server, "reset", all_keys=True)
    assert found() == [False] * 3
    response = post(server, "cache/reset", "bob", all_keys=True)
    assert response.status_code == 403 and "may not reset" in response.json()["error"]["message"]


def test_a_conversation_is_hinted_at_as_it_was_sent(server: GracefulServer) -> None:
    """What continues it goes with it: here its answer."""
    post(server, "chat/completions", model="smollm2", messages=MESSAGES, max_tokens=4)
    assert hint(server, "retain", seconds=0, messages=MESSAGES) > 200
    assert hint(server, "release", messages=[*MESSAGES, {"role": "assistant", "content": "Another answer"}]) == 0
    assert hint(server, "release", messages=MESSAGES) > 200
    assert num_held(server) == 0


def test_a_signal_loads_the_text_before_its_return(server: GracefulServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "LEAD_S", 0.01)
    ask(server)
    hint(server, "demote")
    assert hint(server, "signal", seconds=0.05, tool="make") > 200
    hints = server.service.llm.cache.hints
    wait_until(lambda: hints.loading or num_held(server))
    assert ask(server) >= 192
    found = server.service.llm.cache.prefix_cache.returns.owners["ann"].pauses
    assert list(found) == ["make"]


ENVELOPE = {"protocol_version": "0.1", "message_id": "m"}
DEMOTE = {"action_id": "first", "action_type": "kv.demote", "action_version": "1.0", "payload": {}}
APIS = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "completions": {"prompt": TEXT, "max_tokens": 4},
    "responses": {"input": TEXT, "max_output_tokens": 4},
    "messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_requests_carry_hints(server: GracefulServer, api: str, stream: bool) -> None:
    """What means nothing is left out, and named with the reason."""
    others = [
        DEMOTE | {"action_id": "second", "action_type": "kv.fetch"},
        DEMOTE | {"action_id": "third", "action_version": "2.0"},
        DEMOTE | {"action_id": "fourth", "payload": {"x": 1}},
        DEMOTE | {"action_id": "fifth", "action_type": "kv.signal", "payload": {"resume_s": -1}},
    ]
    body = {"model": "smollm2", "stream": stream, **APIS[api], "kv_hints": {**ENVELOPE, "actions": [DEMOTE, *others]}}
    response = post(server, api, **body)
    assert response.status_code == 200, response.text
    wait_until(lambda: num_held(server) == 0)
    warnings = response.headers[WARNING_HEADER].split("; ")
    assert [warning.split()[2] for warning in warnings] == ["second", "third", "fourth", "fifth"]
    assert "its type is none of kv.retain" in warnings[0] and "0 to 3600 seconds" in warnings[3]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("retain", {"prompt": TEXT}, "seconds is missing"),
        ("retain", {"prompt": TEXT, "seconds": 1e9}, "seconds is at most 3600"),
        ("release", {"prompt": TEXT, "num_kept_tokens": -1}, "num_kept_tokens"),
        ("demote", {}, "prompt"),
        ("demote", {"prompt": TEXT, "seconds": "1"}, "seconds"),
        ("forget", {"prompt": TEXT}, "action"),
        ("reset", {"salt": "x"}, "salt"),
        ("reset", {"all_keys": 1}, "all_keys"),
    ],
)
def test_a_bad_hint_is_one_line(server: GracefulServer, route: str, body: dict[str, Any], message: str) -> None:
    response = post(server, f"cache/{route}", **({} if route == "reset" else {"model": "smollm2"}), **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"] + str(response.json()["error"]["param"])
    assert "\n" not in response.json()["error"]["message"]


def test_a_cache_that_keeps_nothing_says_so() -> None:
    with run_tiny_server(engine_options={"prefix_cache": "off"}) as server:
        body = {"model": "smollm2", "prompt": TEXT}
        response = HTTP.post(f"{server.url}/cache/demote", json=body)
        assert response.status_code == 400 and "prefix_cache=off" in response.json()["error"]["message"]
        assert HTTP.post(f"{server.url}/cache/reset", json={}).json()["tokens"] == 0


def test_a_store_is_found_again_after_a_prefetch_that_was_cut_off(tmp_path: Path) -> None:
    """A server that ends while it loads loses nothing."""
    options = {"tier": [disk_spec(tmp_path)], "max_running_requests": 8}
    with run_tiny_server(engine_options=options) as server:
        body = {"model": "smollm2", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
        first = HTTP.post(f"{server.url}/completions", json=body).json()
        HTTP.post(f"{server.url}/cache/demote", json={"model": "smollm2", "prompt": TEXT})
        HTTP.post(f"{server.url}/cache/prefetch", json={"model": "smollm2", "prompt": TEXT})
    with run_tiny_server(engine_options=options) as server:
        again = HTTP.post(f"{server.url}/completions", json=body).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
