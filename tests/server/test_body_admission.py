"""A request has its place and room for its bytes before its body is read, and gives both back however it ends."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.routing import iter_route_contexts
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from retain.server.admission import AdmissionControl, RequestAdmission
from retain.server.auth import ApiKeys
from retain.server.config import Limits
from retain.server.launch import GracefulServer
from retain.server.openai import body as body_module
from retain.server.openai.body import SMALL_BODY, parse_body
from retain.server.openai.errors import APIError
from tests.server.conftest import API_KEYS, HTTP, application_of, run_tiny_server, wait_until

LARGEST = 200_000  # bytes of a body
LIMITS = Limits(max_body_size=LARGEST, max_in_flight_bytes=4 * LARGEST, upload_timeout=60)
GENERATION = {"model": "smollm2", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[GracefulServer]:
    """A server that two keys share, with room for four of the largest bodies."""
    with run_tiny_server(api_keys=ApiKeys(API_KEYS), limits=LIMITS, enable_inspector=True) as running:
        yield running


def header_of(key_name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {API_KEYS[key_name]}"}


def post(server: GracefulServer, content: Any, key_name: str = "ann", path: str = "/v1/completions") -> Any:
    return HTTP.post(server.url.removesuffix("/v1") + path, content=content, headers=header_of(key_name))


def generation_of(size: int) -> bytes:
    """Return a valid body of so many bytes, whose prompt is short."""
    text = json.dumps(GENERATION)
    return (text[:-1] + " " * (size - len(text)) + text[-1]).encode()


@contextmanager
def unfinished_body(server: GracefulServer, announced: int | None, sent: bytes, key_name: str = "ann") -> Iterator[Any]:
    """Send headers and the beginning of a body; `announced` is its whole length, None for one in chunks."""
    url, length = urlsplit(server.url), "Transfer-Encoding: chunked" if announced is None else ""
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.settimeout(30)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEYS[key_name]}\r\n"
        connection.sendall(f"{head}{length or f'Content-Length: {announced}'}\r\n\r\n".encode())
        connection.sendall(b"%x\r\n%s\r\n" % (len(sent), sent) if announced is None else sent)
        yield connection


def in_flight(server: GracefulServer) -> tuple[int, int]:
    admission = server.service.admission
    return admission.num_in_flight, admission.body_bytes.total


# ---- the counts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["admit", "hold", "end"]), st.integers(1, 40))))
def test_what_is_in_flight_is_the_sum_over_requests(steps: list[tuple[int, str, int]]) -> None:
    """Whatever is admitted, grown, refused and ended; and no key has more than twice what it leaves free."""
    limits = Limits(max_queued_requests=20, max_body_size=30, max_in_flight_bytes=100)
    control = AdmissionControl(limits, 10, num_keys=2)
    requests = [control.open(f"key {i % 2}") for i in range(5)]
    for i, step, amount in steps:
        before = requests[i].num_choices, requests[i].num_bytes
        try:
            if step == "end":
                requests[i].__exit__(None, None, None)
            elif step == "admit":
                requests[i].admit(amount)
                assert requests[i].num_choices == amount
            else:
                requests[i].hold_bytes(amount)
                assert requests[i].num_bytes == amount
        except APIError as error:
            assert error.status in (400, 429)
            assert (requests[i].num_choices, requests[i].num_bytes) == before
        assert control.num_in_flight == sum(r.num_choices for r in requests) <= control.max_in_flight
        assert control.body_bytes.total == sum(r.num_bytes for r in requests) <= control.max_bytes
        by_key = {key: sum(r.num_choices for r in requests if r.key_name == key) for key in ("key 0", "key 1")}
        assert control.choices.by_key == {key: count for key, count in by_key.items() if count}
    for request in requests:
        request.__exit__(None, None, None)
    assert control.num_in_flight == control.body_bytes.total == 0
    assert not control.choices.by_key and not control.body_bytes.by_key


def test_a_place_that_grows_is_not_counted_twice() -> None:
    control = AdmissionControl(Limits(max_queued_requests=0), 4)
    with control.open("ann") as request:
        for num_choices in (1, 4, 2, 4):
            request.admit(num_choices)
            assert control.num_in_flight == num_choices
        with pytest.raises(APIError):
            control.open("bob").admit(1)
    assert control.num_in_flight == 0


def test_a_key_with_bodies_leaves_room_for_those_of_others() -> None:
    control = AdmissionControl(LIMITS, 100, num_keys=2)
    held: list[RequestAdmission] = []
    with pytest.raises(APIError, match="must leave room") as error:
        for _ in range(10):
            held.append(control.open("ann"))
            held[-1].hold_bytes(LARGEST)
    assert error.value.status == 429 and error.value.headers and int(error.value.headers["Retry-After"]) >= 1
    assert control.body_bytes.total == 2 * LARGEST
    control.open("bob").hold_bytes(LARGEST)  # the largest body of another key


@pytest.mark.parametrize("num_keys", [0, 1, 2])
def test_an_idle_server_takes_any_legal_body(num_keys: int) -> None:
    control = AdmissionControl(Limits(max_body_size=2**30, max_in_flight_bytes=1), 1, num_keys)
    with control.open("ann") as request:
        request.hold_bytes(2**30)
        with pytest.raises(APIError):
            control.open("bob").hold_bytes(1)


def test_a_draining_server_goes_on_with_bodies_that_it_reads() -> None:
    control = AdmissionControl(Limits(), 1)
    with control.open("ann") as request:
        request.admit(1)
        control.closed = True
        request.admit(2)
        with pytest.raises(APIError) as error:
            control.open("bob").admit(1)
    assert error.value.status == 503


# ---- bodies that are read --------------------------------------------------------------------------------------------


def test_a_body_has_its_place_and_its_bytes_while_it_is_read(keyed_server: GracefulServer) -> None:
    with unfinished_body(keyed_server, LARGEST, b"{"):
        wait_until(lambda: in_flight(keyed_server) == (1, LARGEST))
        with unfinished_body(keyed_server, None, b" " * 5000, "bob"):
            wait_until(lambda: in_flight(keyed_server) == (2, LARGEST + 5000))
    wait_until(lambda: in_flight(keyed_server) == (0, 0))


def test_bytes_beyond_the_limit_are_refused_before_they_are_read(keyed_server: GracefulServer) -> None:
    with ExitStack() as stack:
        for num_bodies in (1, 2):
            stack.enter_context(unfinished_body(keyed_server, LARGEST, b"{"))
            wait_until(lambda n=num_bodies: in_flight(keyed_server) == (n, n * LARGEST))
        with unfinished_body(keyed_server, LARGEST, b"") as third:
            answer = third.recv(2**16).decode().lower()
        assert answer.startswith("http/1.1 429 ") and "\r\nretry-after: " in answer
        with unfinished_body(keyed_server, None, b" " * 1000) as in_chunks:
            wait_until(lambda: in_flight(keyed_server) == (3, 2 * LARGEST + 1000))
            in_chunks.sendall(b"%x\r\n%s\r\n" % (LARGEST - 1000, b" " * (LARGEST - 1000)))
            assert in_chunks.recv(2**16).startswith(b"HTTP/1.1 429 ")
        assert post(keyed_server, generation_of(LARGEST), "bob").status_code == 200
    wait_until(lambda: in_flight(keyed_server) == (0, 0))
    assert post(keyed_server, generation_of(LARGEST)).status_code == 200


def test_a_hang_up_within_a_body_is_no_failure(keyed_server: GracefulServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "retain"):
        with unfinished_body(keyed_server, LARGEST, b"{"), unfinished_body(keyed_server, None, b"{"):
            wait_until(lambda: in_flight(keyed_server)[0] == 2)
        wait_until(lambda: in_flight(keyed_server) == (0, 0))
        wait_until(lambda: sum("hung up" in record.getMessage() for record in caplog.records) == 2)
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.DEBUG]


@pytest.mark.parametrize(
    ("fields", "headers", "status"),
    [
        ({}, {}, 200),
        ({"x": 1}, {}, 400),
        ({"n": 17}, {}, 400),
        ({"model": "other"}, {}, 404),
        ({"prompt": "x" * 150_000}, {}, 400),
        ({}, {"content-encoding": "gzip"}, 415),
        ({"prompt": "x" * LARGEST}, {}, 413),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_nothing_stays_in_flight_however_a_request_ends(
    keyed_server: GracefulServer, fields: dict[str, Any], headers: dict[str, str], status: int, is_chunked: bool
) -> None:
    data = json.dumps(GENERATION | fields).encode()
    content = iter([data[:10], data[10:]]) if is_chunked else data
    response = HTTP.post(f"{keyed_server.url}/completions", content=content, headers=header_of("ann") | headers)
    assert response.status_code == status
    wait_until(lambda: in_flight(keyed_server) == (0, 0))


def test_every_route_refuses_before_it_reads_a_body(
    keyed_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address and method, those of the inspector and of what is none of ours as well."""
    monkeypatch.setattr(keyed_server.service.admission, "max_in_flight", 0)
    application = application_of(keyed_server)
    paths = sorted({str(context.path) for context in iter_route_contexts(application.routes)} | {"/nowhere"})
    url, refused = urlsplit(keyed_server.url), set()
    for path in paths:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            with socket.create_connection((url.hostname, url.port)) as connection:
                connection.settimeout(30)  # for one that waits for the body
                head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEYS['ann']}\r\n"
                connection.sendall(f"{head}Content-Length: {LARGEST}\r\n\r\n".encode())
                status = int(connection.recv(2**16).split()[1])
            assert status in (404, 405, 429), (method, path, status)
            refused |= {path} if status == 429 else set()
    document = HTTP.get(f"{keyed_server.url.removesuffix('/v1')}/openapi.json", headers=header_of("ann")).json()
    assert refused >= {path for path, operations in document["paths"].items() if "requestBody" in str(operations)}


def test_no_garbage_collection_visits_what_a_server_was_started_with() -> None:
    """A body of many objects leads to collections of all of them, and nothing else runs meanwhile."""
    before = gc.get_freeze_count()
    with run_tiny_server():
        assert gc.get_freeze_count() > 2 * len(gc.get_objects())
    assert gc.get_freeze_count() <= before


# ---- parsing ---------------------------------------------------------------------------------------------------------


class HeldParser:
    """Stands for `parse_body`: large bodies wait until they are let go. Counts those that are parsed at once."""

    def __init__(self) -> None:
        self.resume, self.num_large, self.max_large = threading.Event(), 0, 0

    def parse(self, data: bytearray, adapter: TypeAdapter[Any]) -> Any:
        if len(data) > SMALL_BODY:
            self.num_large += 1
            self.max_large = max(self.max_large, self.num_large)
            assert self.resume.wait(60)
            self.num_large -= 1
        return parse_body(data, adapter)


def test_a_key_parses_one_large_body_at_once_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    held, statuses = HeldParser(), []
    monkeypatch.setattr(body_module, "parse_body", held.parse)
    large, small = generation_of(SMALL_BODY + 1), generation_of(SMALL_BODY)
    with run_tiny_server(api_keys=ApiKeys(API_KEYS)) as server:
        threads = [threading.Thread(target=lambda: statuses.append(post(server, large).status_code)) for _ in range(12)]
        for thread in threads:
            thread.start()
        wait_until(lambda: in_flight(server) == (12, 12 * len(large)))
        wait_until(lambda: held.num_large == 1)
        assert post(server, small, "bob").status_code == 200
        assert post(server, small).status_code == 200  # of the same key
        other = threading.Thread(target=lambda: statuses.append(post(server, large, "bob").status_code))
        other.start()
        wait_until(lambda: held.num_large == 2)  # a large one of another key, at once
        assert not statuses and held.max_large == 2
        held.resume.set()
        for thread in (*threads, other):
            thread.join(60)
        assert statuses == [200] * 13 and held.max_large == 2
        wait_until(lambda: in_flight(server) == (0, 0))
