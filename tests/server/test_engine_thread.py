"""The engine's thread bears what one request, one caller or one bug does to it: others never wait for ever."""

import asyncio
import threading

import httpx
import pytest

from retain.server.admission import Limits
from tests.server.conftest import ENGINE_OPTIONS, run_server

STORY = "Once upon a time there was a lamp that nobody could put out, and the people of the town came to see it. " * 8


@pytest.fixture(scope="module")
def limited_server():
    with run_server(
        engine={**ENGINE_OPTIONS, "max_running_requests": 4}, limits=Limits(request_timeout=20), inspect=True
    ) as up:
        yield up


def post(server, **fields):
    body = {"model": "smollm2", "prompt": STORY, "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/completions", json=body, timeout=120)


def run_in_engine_thread(server, function):
    worker = server.service.worker
    return asyncio.run_coroutine_threadsafe(worker.call(function), worker._loop)


@pytest.mark.parametrize(
    "policy",
    [
        f"random:budget=64,seed={10**20}",
        f"sinks:budget={10**12}",
        f"sinks:budget=64,sinks={10**13}",
        "keyformer:budget=64,tau=nan..nan",
        f"h2o:budget=64,interval={2**28}",
        f"h2o:budget=64,recent={2**28}",
        f"ring:window={2**28}",
        f"snapkv:budget=64,queries={2**28}",
        f"h2o:budget={2**28},prefill=stream,chunk={2**28}",
    ],
)
def test_extreme_policy_options_do_not_break_the_engine(limited_server, policy):
    said = post(limited_server, kv_policy=policy, n=2)
    assert said.status_code in (200, 400), said.text
    assert post(limited_server).status_code == 200


def test_failing_fork_fails_only_its_request(limited_server, monkeypatch):
    """Two answers to a prompt, one begins as a copy of the other, and that goes wrong."""
    cache, settle = limited_server.service.llm.cache, limited_server.service.llm.cache.settle
    calls = []

    def fail(row, computed, owed):
        calls.append(row)
        if len(calls) == 2:
            raise RuntimeError("a bug")
        settle(row, computed, owed)

    monkeypatch.setattr(cache, "settle", fail)
    assert post(limited_server, n=2).status_code == 500
    monkeypatch.undo()
    assert post(limited_server, n=2).status_code == 200 and limited_server.service.worker.broken is None


def test_engine_thread_failure_is_reported(monkeypatch):
    """Whoever waits is told, nobody new is let in, and the tiers are closed."""
    with run_server(engine=ENGINE_OPTIONS) as up:
        check_engine_thread_failure(up, monkeypatch)


def check_engine_thread_failure(server, monkeypatch):
    worker, found = server.service.worker, []
    waits = threading.Thread(target=lambda: found.append(post(server, max_tokens=1500)))
    waits.start()
    while not server.service.llm.engine.busy:
        pass
    monkeypatch.setattr(worker, "_tell", lambda ready: 1 / 0)
    waits.join(60)
    assert found[0].status_code == 503
    root = server.url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").status_code == 503 and httpx.get(f"{root}/ready").status_code == 503
    assert post(server).status_code == 503 and httpx.get(f"{root}/metrics").status_code in (500, 503)
    for request in list(server.service.llm.engine.scheduler.running):
        server.service.llm.engine.cancel(request)


def test_cancelled_call_does_not_block_others(limited_server):
    hold = threading.Event()
    first = run_in_engine_thread(limited_server, hold.wait)
    second = run_in_engine_thread(limited_server, lambda: 1)
    second.cancel()
    hold.set()
    assert first.result(60) and run_in_engine_thread(limited_server, lambda: 2).result(60) == 2
    assert post(limited_server).status_code == 200


def test_failing_observer_is_ignored(limited_server, monkeypatch):
    for name in ("began", "stepped", "ended"):
        monkeypatch.setattr(limited_server.service.worker.observers[0], name, lambda *_: 1 / 0)
    assert post(limited_server).status_code == 200


def test_rejected_requests_are_not_tracked(limited_server):
    inspector = limited_server.service.worker.observers[1]
    for _ in range(3):
        assert post(limited_server, max_tokens=100_000).status_code == 400
    run_in_engine_thread(limited_server, lambda: None).result(60)
    assert not inspector.live


def test_request_timeout():
    with run_server(engine=ENGINE_OPTIONS, limits=Limits(request_timeout=2.0)) as up:
        assert post(up, max_tokens=1700).status_code == 408
        text = post(up, max_tokens=1700, stream=True).text
        assert text.count("data: {") > 3 and '"timeout_error"' in text.splitlines()[-2] and "[DONE]" not in text


def nested_json(n):
    return "[" * n + "]" * n


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", f'{{"model": "smollm2", "prompt": {nested_json(900)}}}'),
        ("/completions", f'{{"model": "smollm2", "prompt": {nested_json(100_000)}}}'),
        (
            "/chat/completions",
            '{"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
            f'"json_schema", "json_schema": {{"schema": {{"enum": {nested_json(400)}}}}}}}}}',
        ),
    ],
)
def test_deeply_nested_body_is_rejected(server, path, body):
    said = httpx.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=120)
    assert said.status_code == 400, said.text


def test_grammar_failure_is_an_error(server):
    """llguidance gives up at some expressions; half an object must not look like a whole one."""
    schema = {"type": "string", "pattern": "((a{1,30}){1,30}){1,30}"}
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "aaaa"}],
        "max_tokens": 200,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    said = httpx.post(f"{server.url}/chat/completions", json=asked, timeout=120)
    if said.status_code == 200:
        (choice,) = said.json()["choices"]
        assert choice["finish_reason"] == "length" or choice["message"]["content"].endswith('"')
    else:
        assert said.status_code == 400 and "form" in said.json()["error"]["message"]


def test_cached_tokens_with_n(server):
    asked = {"prompt": STORY + "several", "temperature": 0}
    post(server, **asked)
    found = [post(server, **asked, n=n).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for n in (1, 2)]
    assert found[0] == found[1] > 100


def test_echo_logprobs_with_n(server):
    said = post(server, prompt="The sea is wide", echo=True, logprobs=1, n=2, seed=1).json()["choices"]
    first, second = (c["logprobs"]["token_logprobs"][:4] for c in said)
    assert first[0] is second[0] is None and first[1:] == pytest.approx(second[1:], abs=1e-4)
