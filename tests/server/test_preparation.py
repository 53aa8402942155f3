"""Requests on their way to the engine: grammars stop nobody else's requests, and who hangs up leaves the queue."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from retain.server.auth import ANONYMOUS, ApiKeys
from retain.server.grammar_trials import MAX_KNOWN, MAX_KNOWN_SIZE, GrammarTrials
from retain.server.launch import GracefulServer
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.preparation import PreparationPool
from retain.server.sandbox import Sandbox
from tests.server.conftest import API_KEYS, HTTP, run_in_engine_thread, run_tiny_server, wait_until
from tests.server.test_connections import connect, head_of

MESSAGES = [{"role": "user", "content": "x"}]


class FakeSandbox(Sandbox):
    """Compiles nothing: counts the trials, which wait until `release` is set."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.release = threading.Event()

    def check_grammar(self, grammar: str, special_tokens: Sequence[str] = ()) -> None:
        self.tried.append(grammar)
        assert self.release.wait(120)
        if grammar == "bad":
            raise ValueError("the grammar is bad")


def check_all(trials: GrammarTrials, *checks: tuple[str, str]) -> None:
    async def run() -> None:
        for key, grammar in checks:
            await trials.check(key, grammar)

    asyncio.run(run())


def test_a_grammar_is_tried_once_for_each_key() -> None:
    sandbox = FakeSandbox()
    sandbox.release.set()
    trials = GrammarTrials(sandbox, 2)
    check_all(trials, *[("ann", "a"), ("ann", "b")] * 3)
    assert sandbox.tried == ["a", "b"]
    check_all(trials, ("bob", "a"))  # its time must not tell that another key has tried it
    assert sandbox.tried == ["a", "b", "a"]
    trials.close()


def test_a_grammar_that_fails_is_tried_again_and_what_is_known_is_bounded() -> None:
    sandbox = FakeSandbox()
    sandbox.release.set()
    trials = GrammarTrials(sandbox, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="is bad"):
            check_all(trials, ("ann", "bad"))
    assert sandbox.tried == ["bad"] * 2
    large = "x" * (MAX_KNOWN_SIZE + 1)
    check_all(trials, ("ann", large), *(("ann", str(i)) for i in range(2 * MAX_KNOWN)))
    assert len(trials._passed["ann"]) == MAX_KNOWN
    check_all(trials, ("ann", large), ("ann", str(2 * MAX_KNOWN - 1)), ("ann", "0"))
    assert sandbox.tried[-2:] == [large, "0"]
    trials.close()


@pytest.mark.parametrize(("num_keys", "num_places"), [(0, 2), (1, 2), (2, 1), (5, 1)])
def test_a_key_leaves_a_place_for_grammars_to_another_if_there_is_one(num_keys: int, num_places: int) -> None:
    async def run() -> None:
        sandbox = FakeSandbox()
        trials = GrammarTrials(sandbox, num_keys)
        checks = [asyncio.create_task(trials.check("ann", f"a{i}")) for i in range(8)]
        await asyncio.to_thread(wait_until, lambda: len(sandbox.tried) == num_places)
        if num_keys > 1:
            checks.append(asyncio.create_task(trials.check("bob", "b")))
            await asyncio.to_thread(wait_until, lambda: sandbox.tried == ["a0", "b"])
        sandbox.release.set()
        await asyncio.gather(*checks)
        trials.close()

    asyncio.run(run())


# ---- a server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GracefulServer, FakeSandbox]]:
    """A server whose trials of grammars take until the test lets them end."""
    with run_tiny_server(api_keys=ApiKeys(API_KEYS)) as server:
        sandbox = FakeSandbox()
        monkeypatch.setattr(server.service.grammar_trials, "_sandbox", sandbox)
        try:
            yield server, sandbox
        finally:
            sandbox.release.set()


def post(server: GracefulServer, key: str, path: str = "chat/completions", **fields: Any) -> int:
    body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 2, **fields}
    headers = {"Authorization": f"Bearer {API_KEYS[key]}"}
    return HTTP.post(f"{server.url}/{path}", json=body, headers=headers).status_code


def with_schema(i: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.slow
def test_no_chat_waits_for_grammars(blocked: tuple[GracefulServer, FakeSandbox]) -> None:
    server, sandbox = blocked
    paths = ["chat/completions", "chat/completions/render"]
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(post, server, "ann", paths[i % 2], **with_schema(i)) for i in range(8)]
        wait_until(lambda: server.service.admission.num_in_flight == 8 and sandbox.tried)
        assert post(server, "bob") == 200
        assert post(server, "ann") == 200  # not even a chat of the same key
        assert len(sandbox.tried) == 1
        sandbox.release.set()
        assert [request.result() for request in waiting] == [200] * 8


def test_a_grammar_is_compiled_once_for_all_choices(
    tiny_server: GracefulServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tiny_server.service
    compiled = []
    compiler = service.llm.input_processor.grammar_compiler
    compile_grammar = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda grammar: compiled.append(grammar) or compile_grammar(grammar))
    body = ChatCompletionRequest.model_validate({"model": "smollm2", "messages": MESSAGES, "n": 4, **with_schema(0)})
    states = service.process(service.prepare_chat(body, ANONYMOUS).requests)
    assert len(compiled) == 1 and len({id(state.request.grammar) for state in states}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("path", ["chat/completions", "chat/completions/render"])
def test_who_hangs_up_leaves_the_queue(path: str, blocked: tuple[GracefulServer, FakeSandbox]) -> None:
    server, sandbox = blocked
    key = f"Authorization: Bearer {API_KEYS['ann']}\r\n"
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, server, "ann", path, **with_schema(0))
        wait_until(lambda: sandbox.tried)
        for i in range(1, 4):
            body = json.dumps({"model": "smollm2", "messages": MESSAGES, "max_tokens": 2, **with_schema(i)}).encode()
            with connect(server) as connection:
                connection.sendall(head_of(path, body, extra=key) + body)
                wait_until(lambda: server.service.admission.num_in_flight == 2)
            wait_until(lambda: server.service.admission.num_in_flight == 1)
        sandbox.release.set()
        assert first.result() == 200
    assert len(sandbox.tried) == 1


def test_who_awaits_a_thread_gets_its_stop_iteration(tiny_server: GracefulServer) -> None:
    """As an error: a coroutine cannot raise it, and a future that refuses it never ends."""

    def run_out() -> int:
        return next(iter(()))

    async def prepare() -> None:
        pool = PreparationPool("test")
        try:
            await asyncio.wait_for(pool.run("ann", run_out), 60)
        finally:
            pool.close()

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(prepare())
    with pytest.raises(RuntimeError, match="StopIteration"):
        run_in_engine_thread(tiny_server, run_out).result(60)
