"""No key slows another: what the largest legal bodies of one key cost the threads that all keys share.

Costs are counted steps of Python, which are the same on any machine, so bodies of a fraction of the largest size tell
what larger ones cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import le
from typing import Any

import httpx
import orjson
import pytest
from fastapi.routing import APIRoute

from retain.server.auth import ApiKeys
from retain.server.config import Limits
from retain.server.launch import GracefulServer
from tests.helpers.counted_threads import ServerSteps, ThreadCounter
from tests.helpers.largest_bodies import (
    LONG_TOKEN,
    LONG_TOKEN_TEXT,
    MAX_BODY_SIZE,
    MESSAGES,
    MODEL,
    Json,
    Shape,
    chat_shapes,
    completion_shapes,
    detokenize_shapes,
    pooled_shapes,
    tokenize_shapes,
)
from tests.helpers.largest_conversations import message_shapes, response_shapes
from tests.server.conftest import API_KEYS, HTTP, application_of, run_in_engine_thread, run_server, wait_until

# Renders the end of a conversation only, so that the largest ones pass every step up to the engine.
TEMPLATE = (
    "{% if tools %}<tool_call>{'name': {{ tools | length }}}{% endif %}"
    "{% for m in messages[-2:] %}{{ m.role }}: {{ (m.content or '')[:40] }}\n{% endfor %}"
)
OF_PROMPTS = (  # shapes for routes that return a prompt, which is prepared as that of an answer
    *("many messages", "many parts", "many prompts", "many calls", "deep reasoning", "breakpoints", "long text"),
    *("many tools", "schema with long enum", "many stop strings"),
)


def select(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Return the shapes for a route that returns a prompt."""
    return {name: shape for name, shape in shapes.items() if name in OF_PROMPTS}


SHAPES: dict[str, dict[str, Shape]] = {
    "/v1/chat/completions": chat_shapes(),
    "/v1/chat/completions/render": select(chat_shapes()),
    "/v1/completions": completion_shapes(),
    "/v1/completions/render": select(completion_shapes()),
    "/v1/responses": response_shapes(),
    "/v1/responses/render": select(response_shapes()),
    "/v1/messages": message_shapes(max_tokens=2),
    "/v1/messages/count_tokens": select(message_shapes()),
    "/v1/embeddings": pooled_shapes("input", "input"),
    "/v1/rerank": pooled_shapes("query", "documents"),
    "/v1/score": pooled_shapes("text_1", "text_2"),
    "/tokenize": tokenize_shapes(),
    "/detokenize": detokenize_shapes(),
    "/v1/cache/signal": select(chat_shapes()),
    "/v1/cache/release": select(completion_shapes()),
    "/v1/cache/reset": {"long text": lambda share: {"cache_salt": "x" * int(256 * share)}},
}
ROUTES = dict.fromkeys(("/v1/cache/signal", "/v1/cache/release"), "/v1/cache/{action}")  # of paths that name no route
LONG = "x" * 30_000  # of an address: the line and the headers have 64 KiB at most
ADDRESSES = {  # the longest of each route without a body
    "/": f"/?{LONG}",
    "/health": f"/health?{LONG}",
    "/ready": f"/ready?{LONG}",
    "/metrics": f"/metrics?{LONG}",
    "/tokenizer_info": f"/tokenizer_info?{LONG}",
    "/v1/models": f"/v1/models?limit=1000&after_id={LONG}",
    "/v1/models/{model:path}": f"/v1/models/{LONG}",
    "/v1/responses/render": f"/v1/responses/render?{LONG}",
    "/v1/responses/{response_id}": f"/v1/responses/{LONG}",
    "/v1/responses/{response_id}/input_items": f"/v1/responses/{LONG}/input_items?after={LONG}",
}
QUICK = ("many messages", "most token ids")  # shapes of `make check`

SHARES = (1 / 8, 1 / 4)  # of the largest body: each is compared with one of half its size

# Bounds of steps: about twice what the slowest shape takes. What a text costs is done in C.
FIXED = 40_000
SHARED_PER_BYTE = 1
SHARED_PER_ANSWER_BYTE = 2
ENGINE_PER_STEP = 12_000
ENGINE_PER_TOKEN = 12_000
PREPARATION_PER_BYTE = 25
GROWTH = 2.5  # of the steps for a body twice as large: 2 where work is linear, 4 where it is quadratic
SLACK = 20_000


@pytest.fixture(scope="module")
def counter() -> Iterator[ThreadCounter]:
    counter = ThreadCounter()
    with counter.installed():
        yield counter


@pytest.fixture(scope="module")
def fair_server(counter: ThreadCounter) -> Iterator[GracefulServer]:
    """A tiny server of two keys with a vocabulary that has a long token."""
    options = {"kv_memory": "64MiB", "dtype": "float32"}
    limits = Limits(max_body_size=MAX_BODY_SIZE, max_stored_bytes=2**26, sandbox_timeout=2.0)
    with run_server("random:tiny", options, TEMPLATE, api_keys=ApiKeys(API_KEYS), limits=limits) as server:
        server.service.llm.tokenizer._token_bytes._cache[LONG_TOKEN] = LONG_TOKEN_TEXT.encode()
        yield server


class Client:
    """Sends requests of one key, and counts what they cost the server's threads."""

    def __init__(self, server: GracefulServer, key_name: str, counter: ThreadCounter):
        self.server = server
        self.root = server.url.removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {API_KEYS[key_name]}"}
        self._counter = counter
        found: list[int] = []
        engine_thread = server.service.engine_thread
        engine_thread._loop.call_soon_threadsafe(lambda: found.append(threading.get_ident()))
        wait_until(lambda: found)
        self._shared = found[0], engine_thread._thread.ident or 0

    def send(self, path: str, body: Json | bytes | None = None, method: str = "POST") -> httpx.Response:
        """Send a request. A body of bytes is JSON already."""
        content = orjson.dumps(body) if isinstance(body, dict) else body
        return HTTP.request(method, self.root + path, content=content, headers=self.headers)

    def measure(self, send: Callable[[], httpx.Response]) -> tuple[ServerSteps, httpx.Response]:
        """Return what a request costs each thread, and its response, which must not be an error of the server."""
        self._settle()
        with self._counter.counting():
            response = send()
            self._settle()
        assert response.status_code < 500 and response.status_code != 429, response.text[:300]
        return self._counter.read(*self._shared), response

    def _settle(self) -> None:
        """Wait until no thread works for an earlier request."""
        wait_until(lambda: not self.server.service.admission.num_in_flight)
        HTTP.get(f"{self.root}/health")
        run_in_engine_thread(self.server, lambda: None).result(60)


@pytest.fixture(scope="module")
def ann(fair_server: GracefulServer, counter: ThreadCounter) -> Client:
    client = Client(fair_server, "ann", counter)
    client.measure(lambda: client.send("/v1/chat/completions", {**MODEL, "messages": MESSAGES, "max_tokens": 2}))
    return client


def assert_bounded(found: ServerSteps, num_bytes: int, answer_bytes: int = 0, steps: tuple[int, int] = (2, 1)) -> None:
    """Check that no thread works for longer than the bytes of a body, its answer, and its tokens allow.

    `steps`: those of the engine, and the choices in each.
    """
    shared = FIXED + SHARED_PER_BYTE * num_bytes + SHARED_PER_ANSWER_BYTE * answer_bytes
    engine = shared + steps[0] * (ENGINE_PER_STEP + ENGINE_PER_TOKEN * steps[1])
    bounds = ServerSteps(shared, engine, FIXED + PREPARATION_PER_BYTE * num_bytes)
    assert all(map(le, found, bounds)), f"{found}, at most {bounds}"


def assert_linear(half: ServerSteps, full: ServerSteps, factor: float = GROWTH) -> None:
    """Check that no thread works for more than `factor` times as long for a body twice as large."""
    grown = [n for n, a, b in zip(ServerSteps._fields, half, full, strict=True) if b > factor * a + SLACK]
    assert not grown, f"{grown}: {half} grows to {full}"


# ---- every route -----------------------------------------------------------------------------------------------------


def find_routes(routes: Iterable[Any]) -> Iterator[tuple[str, bool]]:
    """Yield the path of each route, and whether it takes a body, also of the routers that an application includes."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route.path, route.body_field is not None
        elif router := getattr(route, "original_router", None):
            yield from find_routes(router.routes)


def test_every_route_has_cases(secured_server: GracefulServer) -> None:
    app = application_of(secured_server)
    routes = {(path, has_body) for path, has_body in find_routes(app.routes) if not path.startswith("/inspect")}
    assert routes == {*((ROUTES.get(path, path), True) for path in SHAPES), *((path, False) for path in ADDRESSES)}


def cases() -> Iterator[Any]:
    for path, shapes in SHAPES.items():
        for name in shapes:
            yield pytest.param(path, name, marks=[] if name in QUICK else [pytest.mark.slow], id=f"{path}-{name}")


@pytest.mark.parametrize(("path", "name"), list(cases()))
def test_a_body_costs_what_its_bytes_cost(path: str, name: str, ann: Client) -> None:
    costs = list[ServerSteps]()
    for share in SHARES:
        body = SHAPES[path][name](share)
        content = orjson.dumps(body)
        steps, response = ann.measure(partial(ann.send, path, content))
        num_steps = body.get("max_tokens") or body.get("max_output_tokens", 2)
        assert_bounded(steps, len(content), len(response.content), (num_steps, body.get("n", 1)))
        costs.append(steps)
    assert_linear(*costs)


@pytest.mark.parametrize("path", SHAPES)
def test_the_largest_body_is_answered_within_its_cost(path: str, ann: Client) -> None:
    """One shape of each route at its full size, of which threads parse the text and little else."""
    name = next(n for n in SHAPES[path] if n in ("long text", "many messages", "most token ids"))
    content = orjson.dumps(SHAPES[path][name](1))
    assert len(content) <= MAX_BODY_SIZE
    steps, response = ann.measure(lambda: ann.send(path, content))
    assert_bounded(steps, len(content), len(response.content))


@pytest.mark.parametrize("path", ADDRESSES)
def test_a_long_address_costs_what_its_bytes_cost(path: str, ann: Client) -> None:
    steps, _ = ann.measure(lambda: ann.send(ADDRESSES[path], method="GET"))
    assert_bounded(steps, 2 * len(LONG))


# ---- what a request refers to ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stored_history_costs_what_its_bytes_cost(ann: Client) -> None:
    """Each turn continues the last one, and costs what all turns have together."""
    calls = response_shapes()["many calls"](SHARES[1])
    costs = list[ServerSteps]()
    num_bytes = len(orjson.dumps(calls))
    for _ in range(6):
        steps, response = ann.measure(lambda: ann.send("/v1/responses", calls))
        if response.status_code == 400:  # the history is as long as it may be
            break
        costs.append(steps)
        calls["previous_response_id"] = response.json()["id"]
    assert_bounded(costs[-1], len(costs) * num_bytes)
    assert_linear(costs[0], costs[-1], GROWTH / 2 * len(costs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many calls", "many messages", "many parts", "deep arguments", "long text"])
def test_a_list_of_items_costs_what_its_bytes_cost(name: str, ann: Client) -> None:
    shape = response_shapes()[name]

    def count(share: float) -> ServerSteps:
        response = ann.send("/v1/responses", shape(share))
        assert response.status_code == 200, response.text[:300]
        path = f"/v1/responses/{response.json()['id']}"
        steps, items = ann.measure(lambda: ann.send(f"{path}/input_items?limit=100", method="GET"))
        assert items.status_code == 200
        assert_bounded(steps, len(orjson.dumps(shape(share))), len(items.content))
        return steps

    assert_linear(*map(count, SHARES))


@pytest.mark.slow
def test_references_stand_for_no_more_than_a_body_holds(ann: Client) -> None:
    item = {"type": "message", "role": "user", "content": "x" * (MAX_BODY_SIZE // 2), "id": "msg_long"}
    asked = {**MODEL, "max_output_tokens": 1}
    assert ann.send("/v1/responses", {**asked, "input": [item]}).status_code == 200
    reference = {"type": "item_reference", "id": "msg_long"}
    assert ann.send("/v1/responses", {**asked, "input": [reference]}).status_code == 200
    assert ann.send("/v1/responses", {**asked, "input": [reference] * 8}).status_code == 400
    assert ann.send("/v1/responses/render", {**MODEL, "input": [reference] * 8}).status_code == 400


# ---- another key -----------------------------------------------------------------------------------------------------


def chat(client: Client) -> tuple[int, Any]:
    """Return the status and the greedy tokens of a short chat."""
    body = {**MODEL, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    response = client.send("/v1/chat/completions", body)
    return response.status_code, response.json().get("choices", [{}])[0].get("token_ids")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many messages", "many parts"])
def test_another_key_waits_for_a_few_bodies_of_many(name: str, ann: Client, counter: ThreadCounter) -> None:
    """Counts the bodies that are answered before a small one of another key: it waits for neither all nor half."""
    bob = Client(ann.server, "bob", counter)
    num_bodies = 24
    quiet = chat(bob)
    content = orjson.dumps(chat_shapes()[name](1) | {"model": "another"})
    assert quiet[0] == 200 and quiet[1]
    with ThreadPoolExecutor(num_bodies) as threads:
        futures = [threads.submit(ann.send, "/v1/chat/completions", content) for _ in range(num_bodies)]
        wait_until(lambda: any(future.done() for future in futures), 60)
        num_before = sum(future.done() for future in futures)
        small = bob.send("/v1/chat/completions", {"model": "another", "messages": MESSAGES})
        num_answered = sum(future.done() for future in futures) - num_before
        health = bob.send("/health", method="GET")
        beside = chat(bob)
    assert small.status_code == 404 and health.status_code == 200 and beside == quiet
    assert all(future.result().status_code in (404, 429) for future in futures)
    assert num_answered < num_bodies // 2
