"""A client that gives up on a long prompt and asks again: what was computed for it is not computed again."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from retain.server.launch import GracefulServer
from tests.helpers.folders import save_tiny_smollm2
from tests.server.conftest import HTTP, run_server, wait_until
from tests.server.real_clients import Log, dictated

pytestmark = pytest.mark.slow

Json = dict[str, Any]
STEP = 512  # tokens of a prompt that a step computes
PROMPT_LENGTH = 5 * STEP
FAMILIES = ["llama", "gemma3_text", "lfm2", "qwen3_5_text"]  # full attention, sliding windows, and two with states


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GracefulServer]:
    folder = save_tiny_smollm2(tmp_path_factory.mktemp(request.param), request.param)
    options = {"kv_memory": "256MiB", "dtype": "float32", "max_running_requests": 2, "max_batched_tokens": STEP}
    with run_server(str(folder), options, allowed_drafters=()) as running:
        yield running


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
def test_a_retry_begins_with_what_was_computed(server: GracefulServer, path: str, streams: bool) -> None:
    text = f"{path} {streams}: " + " ".join("milk" for _ in range(PROMPT_LENGTH))  # no other test's prompt
    messages = [{"role": "user", "content": text}]
    body: Json = {"model": "smollm2", "stream": streams}
    if path == "/v1/responses":
        body |= {"input": text, "max_output_tokens": 4}
    else:
        body |= {"prompt": text} if path == "/v1/completions" else {"messages": messages}
        body["max_tokens"] = 4
    with dictated(server, lambda _: "Done.") as log:
        with paused_after(server, log, 3 * STEP):
            hang_up(server, path, body, log)
        assert HTTP.post(server.url.removesuffix("/v1") + path, json=body).status_code == 200
    first, second = log.requests
    assert first.prompt == second.prompt and len(second.prompt) > PROMPT_LENGTH
    assert 3 * STEP <= first.num_computed_tokens < len(first.prompt)
    assert second.stats.num_cached_tokens == first.num_computed_tokens


@contextmanager
def paused_after(server: GracefulServer, log: Log, num_tokens: int) -> Iterator[None]:
    """Run no step once this much of a prompt is computed, until the block ends and a command is queued."""
    engine, commands = server.service.llm.engine, server.service.engine_thread._commands
    step, resume = engine.step, threading.Event()

    def step_or_wait() -> Any:
        if not resume.is_set() and log.requests and log.requests[0].num_computed_tokens >= num_tokens:
            resume.wait(60)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step_or_wait)
        yield
        wait_until(lambda: commands.qsize() > 0)
        resume.set()


def hang_up(server: GracefulServer, path: str, body: Json, log: Log) -> None:
    """Send a request, and close the connection once a part of its prompt is computed."""
    url = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: log.requests and log.requests[0].num_computed_tokens >= 3 * STEP)
