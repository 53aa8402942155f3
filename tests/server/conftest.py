"""A server of SmolLM2 on a port of its own, for all of these tests; and others with options of their own."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from retain import LLM
from retain.server.keys import Keys
from retain.server.limits import Limits
from retain.server.serve import Draining, Place, serve

KEYS = {"ann": "sk-ann-0123456789", "bob": "sk-bob-0123456789"}
ENGINE = {"kv_memory": "512MiB", "context": 2048, "dtype": "float32"}


@contextmanager
def serving(
    model: str = "smollm2", engine: dict[str, Any] = ENGINE, template: str | None = None, **place: Any
) -> Iterator[Draining]:
    """A server in a thread; all its pages are free when it ends, but for those of the prefix tree.

    `template`: for conversations, instead of the model's own.
    """
    up: list[Draining] = []
    listening = threading.Event()

    def told(server: Draining) -> None:
        up.append(server)
        listening.set()

    def make() -> LLM:
        llm = LLM(model, **engine)
        llm.tokenizer.chat_template = template or llm.tokenizer.chat_template
        return llm

    options = {"port": 0, "name": "smollm2", "drafters": ("ngram", "self"), **place}
    thread = threading.Thread(target=serve, args=(make, Place(**options), told), daemon=True)
    thread.start()
    assert listening.wait(120)
    try:
        yield up[0]
        balanced(up[0])
    finally:
        up[0].should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def balanced(server: Draining) -> None:
    """The accountant finds nothing, and nobody holds anything."""
    cache = server.service.llm.cache
    deadline = time.monotonic() + 60
    while server.service.llm.engine.has_unfinished_requests or server.service.gate.inside:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cache.check()
    if cache.prefix_cache:
        cache.prefix_cache.tree.unpin_all()
    assert cache.free_pages == cache.total_pages and cache.free_rows == server.service.llm.config.max_running_requests
    assert server.service.gate.inside == 0


@pytest.fixture(scope="session")
def server() -> Iterator[Draining]:
    with serving(limits=Limits(tokens=250)) as up:
        yield up


@pytest.fixture(scope="session")
def locked() -> Iterator[Draining]:
    """The same for two keys, with little patience."""
    limits = Limits(queue=2, per_key=4, tokens=2000, choices=3, body=100_000, upload_s=1.0, pin_s=60.0)
    engine = {**ENGINE, "max_running_requests": 2, "kv_memory": "256MiB"}
    with serving(engine=engine, keys=Keys(KEYS), limits=limits) as up:
        yield up
