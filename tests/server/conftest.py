"""A server of SmolLM2 on a port of its own, for all of these tests; and others with options of their own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from retain import LLM
from retain.server.admission import Limits
from retain.server.auth import ApiKeys
from retain.server.launch import GracefulServer, ServerConfig, serve

API_KEYS = {"ann": "sk-ann-0123456789", "bob": "sk-bob-0123456789"}
ENGINE_OPTIONS = {"kv_memory": "512MiB", "context": 2048, "dtype": "float32"}


@contextmanager
def run_server(
    model: str = "smollm2",
    engine_options: dict[str, Any] = ENGINE_OPTIONS,
    chat_template: str | None = None,
    **server_options: Any,
) -> Iterator[GracefulServer]:
    """A server in a thread; all its pages are free when it ends, but for those of the prefix tree.

    `template`: for conversations, instead of the model's own.
    """
    up: list[GracefulServer] = []
    listening = threading.Event()

    def on_ready(server: GracefulServer) -> None:
        up.append(server)
        listening.set()

    def load_llm() -> LLM:
        llm = LLM(model, **engine_options)
        llm.tokenizer.chat_template = chat_template or llm.tokenizer.chat_template
        return llm

    options = {"port": 0, "name": "smollm2", "drafters": ("ngram", "self"), **server_options}
    thread = threading.Thread(target=serve, args=(load_llm, ServerConfig(**options), on_ready), daemon=True)
    thread.start()
    assert listening.wait(120)
    try:
        yield up[0]
        assert_nothing_leaked(up[0])
    finally:
        up[0].should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def assert_nothing_leaked(server: GracefulServer) -> None:
    """The accountant finds nothing, and nobody holds anything."""
    cache = server.service.llm.cache
    deadline = time.monotonic() + 60
    while server.service.llm.engine.has_unfinished_requests or server.service.admission.num_in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cache.check()
    if cache.prefix_cache:
        cache.prefix_cache.tree.unpin_all()
    assert cache.free_pages == cache.total_pages and cache.free_rows == server.service.llm.config.max_running_requests
    assert server.service.admission.num_in_flight == 0


@pytest.fixture(scope="session")
def server() -> Iterator[GracefulServer]:
    with run_server(limits=Limits(max_output_tokens=250)) as up:
        yield up


@pytest.fixture(scope="session")
def secured_server() -> Iterator[GracefulServer]:
    """The same for two keys, with little patience."""
    limits = Limits(
        max_queued_requests=2,
        max_requests_per_key=4,
        max_output_tokens=2000,
        max_choices=3,
        max_body_size=100_000,
        upload_timeout=1.0,
        max_pin_s=60.0,
    )
    engine = {**ENGINE_OPTIONS, "max_running_requests": 2, "kv_memory": "256MiB"}
    with run_server(engine=engine, keys=ApiKeys(API_KEYS), limits=limits) as up:
        yield up
