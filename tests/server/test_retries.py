"""A client that gives up on a long prompt and asks again: what was computed for it is not computed again."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from anthropic import Anthropic
from openai import OpenAI

from retain import LLM
from retain.server.config import ServerConfig
from retain.server.launch import GracefulServer, open_service
from retain.server.openai import streaming
from tests.helpers.folders import save_tiny_smollm2
from tests.server.conftest import HTTP, run_server, wait_until
from tests.server.real_clients import dictated

pytestmark = pytest.mark.slow

Json = dict[str, Any]
STEP = 512  # tokens of a prompt that a step computes
PROMPT_LENGTH = 5 * STEP
FAMILIES = ["llama", "gemma3_text", "lfm2", "qwen3_5_text"]  # full attention, sliding windows, and two with states
PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"]


def body_of(path: str, text: str) -> Json:
    """Return a request for four tokens."""
    if path == "/v1/responses":
        return {"model": "smollm2", "input": text, "max_output_tokens": 4}
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return {"model": "smollm2", "max_tokens": 4, **prompt}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GracefulServer]:
    folder = save_tiny_smollm2(tmp_path_factory.mktemp(request.param), request.param)
    options = {"kv_memory": "256MiB", "dtype": "float32", "max_running_requests": 2, "max_batched_tokens": STEP}
    with run_server(str(folder), options, allowed_drafters=()) as running:
        yield running


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_retry_begins_with_what_was_computed(server: GracefulServer, path: str, streams: bool) -> None:
    text = f"{path} {streams}: " + " ".join("milk" for _ in range(PROMPT_LENGTH))  # no other test's prompt
    body = {**body_of(path, text), "stream": streams}
    with dictated(server, lambda _: "Done.") as log:

        def is_half_done() -> bool:
            return bool(log.requests) and log.requests[0].num_computed_tokens >= 3 * STEP

        with steps_held(server, is_half_done):
            hang_up(server, path, body, is_half_done)
        assert HTTP.post(server.url.removesuffix("/v1") + path, json=body).status_code == 200
    first, second = log.requests
    assert first.prompt == second.prompt and len(second.prompt) > PROMPT_LENGTH
    assert 3 * STEP <= first.num_computed_tokens < len(first.prompt)
    assert second.stats.num_cached_tokens == first.num_computed_tokens


@contextmanager
def steps_held(server: GracefulServer, is_due: Callable[[], Any] = lambda: True) -> Iterator[None]:
    """Run no step once one is due, until the block ends; the engine accepts requests meanwhile."""
    engine, resume = server.service.llm.engine, threading.Event()
    step = engine.step

    def step_or_wait() -> Any:
        if is_due():
            resume.wait(60)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step_or_wait)
        try:
            yield
        finally:
            resume.set()


def hang_up(server: GracefulServer, path: str, body: Json, is_due: Callable[[], bool]) -> None:
    """Send a request, and close the connection when that is due. Returns when the server is about to cancel it."""
    url = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(is_due)
    # The command may be done already, if the engine's thread had not yet begun the step that is held.
    service = server.service
    wait_until(lambda: service.engine_thread._commands.qsize() > 0 or not service.llm.engine.has_unfinished_requests)


@pytest.mark.parametrize("path", PATHS)
def test_a_silent_stream_has_comments(tiny_server: GracefulServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for a long prompt gets bytes, and no event beside those of the answer."""
    url = tiny_server.url.removesuffix("/v1") + path
    body = {**body_of(path, "Hi"), "stream": True, "temperature": 0}
    with HTTP.stream("POST", url, json=body) as stream:
        expected = [line for line in stream.iter_lines() if line.startswith("data: ")]
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    with ExitStack() as stack:
        with steps_held(tiny_server):
            lines = stack.enter_context(HTTP.stream("POST", url, json=body)).iter_lines()
            comments = [next(line for line in lines if line.startswith(":")) for _ in range(2)]
        rest = list(lines)
    assert comments == [streaming.KEEP_ALIVE.decode().strip()] * 2
    # A response begins before its first token: those events came before the comments.
    assert len([line for line in rest if line.startswith("data: ")]) + 2 * (path == "/v1/responses") == len(expected)


def test_clients_skip_comments(tiny_server: GracefulServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.001)
    url = tiny_server.url
    message: Any = {"role": "user", "content": "Hi"}
    options: Json = {"model": "smollm2", "messages": [message], "max_tokens": 8, "extra_body": {"temperature": 0}}
    openai = OpenAI(base_url=url, api_key="none")
    chunks = list(openai.chat.completions.create(**options, stream=True))
    text = openai.chat.completions.create(**options).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    with Anthropic(base_url=url.removesuffix("/v1"), api_key="none").messages.stream(**options) as stream:
        assert stream.get_final_text() == text


def test_a_server_offers_the_drafters_that_fit_its_model(tmp_path: Path) -> None:
    """`self` needs layers that are alike, which those of Gemma 4 are not; one that the user named must fit."""
    folder = save_tiny_smollm2(tmp_path, "gemma4_text")
    options: dict[str, Any] = {"kv_memory": "64MiB", "dtype": "float32"}
    with run_server(str(folder), options, allowed_drafters=("ngram", "self")) as running:
        assert running.service.drafters == ["ngram"]
        body = body_of("/v1/completions", "The sea") | {"speculate": "self"}
        assert HTTP.post(f"{running.url}/completions", json=body).status_code == 400

    async def open_with(drafter: str) -> None:
        config = ServerConfig(served_model_name=("a",), allowed_drafters=(drafter,))
        async with open_service(lambda: LLM(str(folder), **options), config):
            pass

    with pytest.raises(ValueError, match="self: dtype=auto needs layers that are alike"):
        asyncio.run(open_with("self:budget=64"))
