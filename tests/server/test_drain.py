"""A server that drains: what it accepted before the signal is finished, and whatever comes later is refused."""

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.conftest import HTTP, engine_paused, run_tiny_server, wait_until

NUM_STREAMS = 6
NUM_TOKENS = 40
BODY = {"model": "smollm2", "prompt": "x", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


def stream(server, **fields):
    """Return the last two events of a stream: the usage and [DONE] of one that is whole."""
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}} | fields
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=60) as answer:
        return [line for line in answer.iter_lines() if line][-2:]


def begin_upload(server):
    """Send a request without the last byte of its body, which comes when `finish` is called."""
    url = urlsplit(server.url)
    body = json.dumps(BODY).encode()
    connection = socket.create_connection((url.hostname, url.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection.sendall(head + body[:-1])

    def finish():
        connection.sendall(body[-1:])
        with connection, connection.makefile("rb") as answer:
            return answer.readline()

    return finish


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest():
    """Streams that run, streams that wait, one that is being prepared and a body that is still on its way."""
    with (
        run_tiny_server(engine_options={"max_running_requests": 2}) as server,
        ThreadPoolExecutor(NUM_STREAMS + 1) as e,
    ):
        service = server.service
        root = server.url.removesuffix("/v1")
        may_prepare = threading.Event()
        process = service.process

        def process_late(requests):
            may_prepare.wait(60)
            return process(requests)

        with engine_paused(server):
            streams = [e.submit(stream, server) for _ in range(NUM_STREAMS)]
            wait_until(lambda: service.engine_thread._commands.qsize() >= NUM_STREAMS)
            service.process = process_late
            streams.append(e.submit(stream, server))
            wait_until(lambda: service.admission.num_in_flight == NUM_STREAMS + 1)
            finish_upload = begin_upload(server)
            wait_until(lambda: len(server.server_state.tasks) == NUM_STREAMS + 2)
            server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: server._accepted)
            for _ in range(2):
                assert HTTP.get(f"{root}/health").status_code == 200
                assert HTTP.get(f"{root}/ready").json() == {"status": "draining"}
                for path in ("completions", "chat/completions", "responses", "messages"):
                    refused = HTTP.post(f"{server.url}/{path}", json=BODY)
                    assert refused.status_code == 503 and refused.headers["retry-after"]
                    assert refused.headers["connection"] == "close"
        may_prepare.set()
        assert finish_upload() == b"HTTP/1.1 200 OK\r\n"
        for usage, last in [each.result(60) for each in streams]:
            assert f'"completion_tokens":{NUM_TOKENS}' in usage and last == "data: [DONE]"
        wait_until(lambda: server.should_exit)


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_what_outlasts_the_drain_is_cut_off_with_an_error(is_second_signal, caplog):
    """By the time limit, or by a second signal."""
    caplog.set_level("INFO")
    with (
        run_tiny_server(drain_timeout=60 * is_second_signal, engine_options={"max_running_requests": 2}) as server,
        ThreadPoolExecutor(NUM_STREAMS) as e,
    ):
        with engine_paused(server):
            streams = [e.submit(stream, server, max_tokens=1900) for _ in range(NUM_STREAMS)]
            wait_until(lambda: server.service.engine_thread._commands.qsize() >= NUM_STREAMS)
            server.handle_exit(signal.SIGTERM, None)
            if is_second_signal:
                wait_until(lambda: server._accepted)
                server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: server.should_exit)
        assert all("the server is shutting down" in each.result(60)[-1] for each in streams)
        server.watchdog.stop()
    assert f"{NUM_STREAMS} requests are cut off" in caplog.text and "Traceback" not in caplog.text
