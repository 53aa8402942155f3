"""Servers in threads: four that all tests share, and others with options of their own."""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from retain import LLM
from retain.server.auth import ApiKeys
from retain.server.config import Limits, ServerConfig
from retain.server.launch import GracefulServer, serve
from retain.server.openai.chat_dialect import ChatDialect
from tests.helpers.browser import Browser

API_KEYS = {"ann": "sk-ann-0123456789", "bob": "sk-bob-0123456789"}
INSPECTOR_API_KEYS = {"carol": "sk-carol-0123456789", "dave": "sk-dave-0123456789"}  # for one test of the inspector
ENGINE_OPTIONS = {"kv_memory": "512MiB", "max_model_len": 2048, "dtype": "float32"}

HTTP = httpx.Client(timeout=120)  # shared: httpx.get would load TLS certificates at every call


def application_of(server: GracefulServer) -> Any:
    """Return the FastAPI application of a server."""
    wrapped: Any = server.config.app
    return wrapped.app


@contextmanager
def run_server(
    model: str = "smollm2",
    engine_options: dict[str, Any] = ENGINE_OPTIONS,
    chat_template: str | None = None,
    **server_options: Any,
) -> Iterator[GracefulServer]:
    """Run a server in a thread. When it ends, all its pages must be free, except those of the prefix tree.

    `chat_template` replaces the model's own.
    """
    servers: list[GracefulServer] = []
    listening = threading.Event()

    def on_ready(server: GracefulServer) -> None:
        servers.append(server)
        listening.set()

    def load_llm() -> LLM:
        return LLM(model, **{"chat_template": chat_template, **engine_options})

    options = {"port": 0, "served_model_name": ("smollm2",), "allowed_drafters": ("ngram", "self"), **server_options}
    thread = threading.Thread(target=serve, args=(load_llm, ServerConfig(**options), on_ready), daemon=True)
    thread.start()
    wait_until(lambda: listening.is_set() or not thread.is_alive(), 120)
    assert servers, "the server did not start"
    try:
        yield servers[0]
        assert_nothing_leaked(servers[0])
    finally:
        servers[0].should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def assert_nothing_leaked(server: GracefulServer) -> None:
    """Check the page accounting, and that neither a request nor a pin holds pages."""
    cache = server.service.llm.cache
    engine, admission = server.service.llm.engine, server.service.admission
    wait_until(lambda: not engine.has_unfinished_requests and not admission.num_in_flight, 60)
    check_cache(server)
    if cache.prefix_cache.enabled:
        cache.prefix_cache.tree.unpin_all()
    # The engine's thread may still be giving back what its last request held.
    num_rows = server.service.llm.config.max_running_requests
    wait_until(lambda: cache.free_pages == cache.total_pages and cache.free_rows == num_rows)
    assert admission.num_in_flight == 0


def check_cache(server: GracefulServer) -> None:
    """Check the page accounting between two steps: the engine's thread may be freeing the pages of its last request."""
    if server.service.engine_thread._thread.is_alive():
        run_in_engine_thread(server, server.service.llm.cache.check).result(60)
    else:
        server.service.llm.cache.check()


def run_in_engine_thread(server: GracefulServer, function: Callable[[], Any]) -> Future[Any]:
    """Call a function in the engine thread, between two steps."""
    engine_thread = server.service.engine_thread
    return asyncio.run_coroutine_threadsafe(engine_thread.call(function), engine_thread._loop)


@contextmanager
def engine_paused(server: GracefulServer, num_commands: int = 0) -> Iterator[None]:
    """Run no engine step until the block ends and this many commands, such as submissions, are queued."""
    is_paused = threading.Event()
    resume = threading.Event()

    def pause() -> None:
        is_paused.set()
        resume.wait()

    paused = run_in_engine_thread(server, pause)
    assert is_paused.wait(60)  # its own command is no longer queued
    yield
    wait_until(lambda: server.service.engine_thread._commands.qsize() >= num_commands)
    resume.set()
    paused.result(60)


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def run_tiny_server(**server_options: Any) -> AbstractContextManager[GracefulServer]:
    """Run a server of a tiny model with random weights and a tokenizer of bytes, for tests that ignore the text."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    engine_options = {"kv_memory": "64MiB", "dtype": "float32"}
    engine_options |= server_options.pop("engine_options", {})
    return run_server("random:tiny", engine_options, template, **server_options)


@contextmanager
def chat_template_replaced(server: GracefulServer, template: str) -> Iterator[None]:
    """Serve the same model with another chat template until the block ends."""
    service, tokenizer = server.service, server.service.llm.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_templates", tokenizer.chat_templates.choose(template))
        patch.setattr(service.chat_renderer, "dialect", ChatDialect.read(tokenizer))
        yield


@pytest.fixture(scope="session")
def smollm2_server() -> Iterator[GracefulServer]:
    """A server of SmolLM2, for tests of what it knows."""
    with run_server(limits=Limits(max_output_tokens=250)) as running:
        yield running


@pytest.fixture(scope="session")
def quick_smollm2_server() -> Iterator[GracefulServer]:
    """A server of SmolLM2 whose weights stay in 4 bits, for tests that ask for no answer of float32: fast."""
    with run_server(engine_options=ENGINE_OPTIONS | {"dtype": "bfloat16"}) as running:
        yield running


@pytest.fixture(scope="session")
def server(tiny_smollm2: str) -> Iterator[GracefulServer]:
    """A server of a tiny model with the tokenizer and the chat template of SmolLM2."""
    with run_server(tiny_smollm2, limits=Limits(max_output_tokens=250)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[GracefulServer]:
    with run_tiny_server() as running:
        yield running


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser; tests are skipped without one."""
    executable = shutil.which("chromium") or pytest.skip("no executable named chromium")
    browser = Browser(executable, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def secured_server() -> Iterator[GracefulServer]:
    """A tiny server with API keys, the inspector and tight limits."""
    limits = Limits(
        max_queued_requests=2,
        max_requests_per_key=4,
        max_output_tokens=2000,
        max_choices=3,
        max_body_size=100_000,
        max_pin_seconds=60.0,
    )
    api_keys = ApiKeys({**API_KEYS, **INSPECTOR_API_KEYS}, operators=["ann"])
    with run_tiny_server(
        engine_options={"max_running_requests": 2}, api_keys=api_keys, limits=limits, enable_inspector=True
    ) as running:
        yield running
