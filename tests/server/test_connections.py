"""Bounds that hold before a request is known, and clients that close their sending side."""

import json
import logging
import socket
import struct
import time
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest

from retain.server.auth import ApiKeys
from retain.server.config import Limits
from tests.server.conftest import API_KEYS, HTTP, assert_nothing_leaked, run_tiny_server, wait_until

pytestmark = pytest.mark.slow

LIMITS = Limits(max_header_size=8192, max_connections=20)
JSON_BODY = {"Content-Type": "application/json"}
MANY = 64 * 2**20  # bytes: far more than the sockets' buffers hold


@pytest.fixture(scope="module")
def bounded_server():
    with run_tiny_server(limits=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def impatient_server():
    """For tests of its patience alone: on a busy machine a client may need longer to send what it means to."""
    with run_tiny_server(limits=Limits(header_timeout=1.0)) as running:
        yield running


@contextmanager
def connect(server):
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.settimeout(20)
        yield connection


def read_all(connection):
    """Read until the server closes the connection."""
    received = b""
    try:
        while data := connection.recv(2**16):
            received += data
    except ConnectionResetError:
        pass
    return received


def send_until_closed(connection, head, piece):
    """Send more and more. Returns how much the server took, and what it answered."""
    connection.sendall(head)
    sent = 0
    try:
        while sent < MANY:
            sent += connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent, read_all(connection)


def head_of(path, body, version="1.1", extra=""):
    return (
        f"POST /v1/{path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()


GENERATION = json.dumps({"model": "smollm2", "prompt": "The sea", "max_tokens": 40, "ignore_eos": True}).encode()
LONG_GENERATION = json.dumps({"model": "smollm2", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}).encode()
STREAM = json.dumps({"model": "smollm2", "prompt": "x", "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()


def is_idle(server):
    service = server.service
    return service.admission.num_in_flight == 0 and not service.llm.engine.has_unfinished_requests


# ---- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /health HTTP/1.1\r\n", b"X-Filler: " + b"x" * 1000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nX-Filler: ", b"x" * 65536),
        (b"GET /", b"x" * 65536),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b"x" * 65536),
        (b"\r\n", b"\r\n" * 30_000),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Filler: " + b"x" * 1000 + b"\r\n"),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Filler: ", b"x" * 65536),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x=", b"x" * 65536),
    ],
    ids=["headers", "one header", "url", "second request", "empty lines", "trailers", "one trailer", "chunk extension"],
)
def test_headers_are_bounded(bounded_server, head, piece):
    with connect(bounded_server) as connection:
        sent, _ = send_until_closed(connection, head, piece)
    assert sent < MANY
    assert HTTP.get(f"{bounded_server.url}/models").status_code == 200


def test_large_headers_are_answered(bounded_server):
    for path, headers in (("/models", {"X-Filler": "x" * 9000}), ("/models?" + "x" * 9000, {})):
        response = HTTP.get(bounded_server.url + path, headers=headers)
        assert response.status_code == 431 and "8192" in response.json()["error"]["message"]
    assert HTTP.get(f"{bounded_server.url}/models", headers={"X-Filler": "x" * 7000}).status_code == 200


def test_bodies_in_single_bytes_are_no_large_headers(bounded_server):
    body = (bytes([byte]) for byte in b" " * 3000 + GENERATION)
    response = HTTP.post(f"{bounded_server.url}/completions", content=body, headers=JSON_BODY)
    assert response.status_code == 200


@pytest.mark.parametrize("head", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: local", b"\r\n"])
def test_headers_that_do_not_come_end_the_connection(impatient_server, head):
    with connect(impatient_server) as connection:
        connection.sendall(head)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") if head else not answer


def test_a_second_request_has_the_same_time(impatient_server):
    with connect(impatient_server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b'"ok"' not in answer:
            answer += connection.recv(2**16)
        connection.sendall(b"GET /hea")
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_the_body_of_a_refused_request_does_not_hold_the_connection():
    """Without a key the answer is 401; the client goes on with its body, a byte at a time."""
    limits = Limits(header_timeout=0.5)
    with run_tiny_server(api_keys=ApiKeys(API_KEYS), limits=limits) as server, connect(server) as connection:
        connection.sendall(head_of("completions", b"x" * 1000))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(300):
                connection.sendall(b"x")
                time.sleep(0.1)


# ---- connections -----------------------------------------------------------------------------------------------------


def test_connections_beyond_the_limit_are_closed_at_once():
    limits = Limits(max_connections=5, header_timeout=60)
    with run_tiny_server(limits=limits) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(server)).sendall(b"GET /hea")
        wait_until(lambda: len(server.server_state.connections) == 5)
        for _ in range(3):
            with connect(server) as late:
                assert read_all(late) == b""
        assert len(server.server_state.connections) == 5
        stack.close()
        wait_until(lambda: not server.server_state.connections)
        assert HTTP.get(f"{server.url}/models").status_code == 200


def test_an_answer_that_nobody_reads_does_not_hold_the_connection():
    """One that is read now and then is sent to its end."""
    send_timeout = 2.0  # 20 times the pause of the slow reader, who reads for longer
    with run_tiny_server(limits=Limits(send_timeout=send_timeout)) as server, connect(server) as connection:
        tokenizer = server.service.llm.tokenizer
        longest = max(range(200, 500), key=lambda token: len(tokenizer.decode([token])))
        body = json.dumps({"model": "smollm2", "tokens": [longest] * 1_000_000}).encode()
        request = head_of("detokenize", body, extra="Connection: close\r\n").replace(b"/v1/", b"/") + body
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request)
        wait_until(lambda: server.server_state.connections)
        wait_until(lambda: not server.server_state.connections)
        with connect(server) as slow:
            slow.sendall(request)
            whole = slow.recv(2**17)
            end = time.monotonic() + 1.2 * send_timeout
            while time.monotonic() < end:
                time.sleep(send_timeout / 20)
                whole += slow.recv(2**17)
            whole += read_all(slow)
        assert whole.endswith(b'"}') and len(whole) > 4_000_000


# ---- clients that close their sending side ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("body", [GENERATION, STREAM], ids=["whole", "stream"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(bounded_server, version, body):
    with connect(bounded_server) as connection:
        connection.sendall(head_of("completions", body, version) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert b" 200 OK\r\n" in answer and (b'"completion_tokens":40' in answer or b"data: [DONE]" in answer)
    wait_until(lambda: is_idle(bounded_server))


@pytest.mark.parametrize("body", [LONG_GENERATION, STREAM.replace(b"40", b"1900")], ids=["whole", "stream"])
def test_a_client_that_is_gone_is_noticed(bounded_server, body):
    with connect(bounded_server) as connection:
        connection.sendall(head_of("completions", body) + body)
        wait_until(lambda: not is_idle(bounded_server))
    requests = list(bounded_server.service.llm.engine.scheduler.running)
    wait_until(lambda: is_idle(bounded_server))
    assert all(len(r.output_tokens) < 1900 for r in requests)
    assert_nothing_leaked(bounded_server)


@pytest.mark.parametrize("body", [LONG_GENERATION, STREAM.replace(b"40", b"1900")], ids=["whole", "stream"])
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("is_late", [False, True], ids=["sent together", "sent later"])
def test_a_client_that_is_gone_is_noticed_behind_a_second_request(bounded_server, body, is_reset, is_late, caplog):
    """Reading pauses while a second request waits, and uvicorn tells only the newest that the client is gone."""
    scheduler = bounded_server.service.llm.engine.scheduler
    first, second = head_of("completions", body) + body, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(bounded_server) as connection:
        connection.sendall(first if is_late else first + second)
        wait_until(lambda: scheduler.running)
        requests = list(scheduler.running)
        if is_late:
            connection.sendall(second)
            wait_until(lambda: any(protocol.pipeline for protocol in list(bounded_server.server_state.connections)))
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: is_idle(bounded_server))
    wait_until(lambda: not bounded_server.server_state.tasks)
    assert requests and all(len(r.output_tokens) < 1900 for r in requests)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert_nothing_leaked(bounded_server)


@pytest.mark.parametrize("body", [GENERATION, STREAM], ids=["whole", "stream"])
def test_a_client_that_closes_its_sending_side_gets_all_answers(bounded_server, body):
    """Also those of requests that waited for their turn."""
    with connect(bounded_server) as connection:
        connection.sendall((head_of("completions", body) + body) * 3)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b" 200 OK\r\n") == 3
    assert answer.count(b'"completion_tokens":40') == 3 or answer.count(b"data: [DONE]") == 3
    wait_until(lambda: is_idle(bounded_server))


def test_half_a_request_gets_no_answer(bounded_server):
    for sent in (b"", b"GET /hea", head_of("completions", GENERATION) + GENERATION[:9]):
        with connect(bounded_server) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""
    wait_until(lambda: is_idle(bounded_server))
