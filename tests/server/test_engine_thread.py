"""The engine thread survives what one request, one client or one bug does to it: other requests never hang."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import pytest

from retain.kv.row import Row
from retain.processing.grammar import GrammarState
from retain.server.config import Limits
from retain.server.observers.inspector.routes import Inspector
from tests.server.conftest import HTTP, engine_paused, run_in_engine_thread, run_tiny_server

STORY = "Once upon a time there was a lamp that nobody could put out, and the people of the town came to see it. " * 8


def post(server, **fields):
    body = {"model": "smollm2", "prompt": STORY, "max_tokens": 4, "ignore_eos": True, **fields}
    return HTTP.post(f"{server.url}/completions", json=body)


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
def test_extreme_policy_options_do_not_break_the_engine(tiny_server, policy):
    response = post(tiny_server, kv_policy=policy, n=2)
    assert response.status_code in (200, 400), response.text
    assert post(tiny_server).status_code == 200


def test_failing_fork_fails_only_its_request(tiny_server, monkeypatch):
    """The second choice of a prompt starts as a fork of the first, and its first advance raises."""
    advance, calls = Row.advance, []

    def fail(row, num_computed_tokens, num_uncomputed_tokens):
        calls.append(row)
        if len(calls) == 2:
            raise RuntimeError("a bug")
        advance(row, num_computed_tokens, num_uncomputed_tokens)

    monkeypatch.setattr(Row, "advance", fail)
    assert post(tiny_server, n=2).status_code == 500
    monkeypatch.undo()
    assert post(tiny_server, n=2).status_code == 200 and tiny_server.service.engine_thread.fatal_error is None


def test_engine_thread_failure_is_reported(monkeypatch):
    """A request in flight and every later one get 503, and the tiers are closed."""
    with run_tiny_server() as server:
        service, responses = server.service, []
        in_flight = threading.Thread(target=lambda: responses.append(post(server, max_tokens=1100)))
        in_flight.start()
        while not service.llm.engine.has_unfinished_requests:
            pass
        monkeypatch.setattr(service.engine_thread, "_publish", lambda sampled_requests: 1 / 0)
        in_flight.join(60)
        assert responses[0].status_code == 503
        root = server.url.removesuffix("/v1")
        assert HTTP.get(f"{root}/health").status_code == 503 and HTTP.get(f"{root}/ready").status_code == 503
        assert post(server).status_code == 503 and HTTP.get(f"{root}/metrics").status_code in (500, 503)
        for request in list(service.llm.engine.scheduler.running):
            service.llm.engine.cancel(request)


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("extra", [{}, {"speculate": "ngram"}])
def test_a_stream_interval_changes_how_tokens_are_sent_and_no_token(tiny_server, monkeypatch, interval, extra):
    monkeypatch.setattr(tiny_server.service, "stream_interval", interval)
    fields = {"max_tokens": 20, "n": 2, "temperature": 0.9, "seed": 1, "logprobs": 0, **extra}
    choices = post(tiny_server, **fields).json()["choices"]
    events = [json.loads(x[6:]) for x in post(tiny_server, stream=True, **fields).text.split("\n\n") if x[6:7] == "{"]
    for full in choices:
        chunks = [c for event in events for c in event["choices"] if c["index"] == full["index"]]
        tokens = [chunk["logprobs"]["tokens"] for chunk in chunks if chunk["logprobs"]]
        assert [token for chunk in tokens for token in chunk] == full["logprobs"]["tokens"]
        assert "".join(chunk["text"] for chunk in chunks) == full["text"]
        sizes = [len(x) for x in tokens]
        assert min(sizes[1:-1], default=interval) >= interval
        assert len(sizes) <= 2 + 20 // interval


def test_cancelled_call_does_not_block_others(tiny_server):
    hold = threading.Event()
    first = run_in_engine_thread(tiny_server, hold.wait)
    second = run_in_engine_thread(tiny_server, lambda: 1)
    second.cancel()
    hold.set()
    assert first.result(60) and run_in_engine_thread(tiny_server, lambda: 2).result(60) == 2
    assert post(tiny_server).status_code == 200


@contextmanager
def steps_counted(server):
    """Count the engine's steps in a list of one number."""
    engine, num_steps = server.service.llm.engine, [0]
    step = engine.step

    def count_step():
        num_steps[0] += 1
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", count_step)
        yield num_steps


def test_commands_that_queue_themselves_again_stop_no_step(tiny_server):
    """Between two steps, a command of each client that asks again and again runs once."""
    engine_thread, engine = tiny_server.service.engine_thread, tiny_server.service.llm.engine
    runs = []  # the number of steps at each run while requests are unfinished

    def run_again():
        if engine.has_unfinished_requests:
            runs.append(num_steps[0])
        if len(runs) < 1000 and not responses:
            engine_thread._commands.put(run_again)

    responses = []
    with steps_counted(tiny_server) as num_steps:
        with engine_paused(tiny_server, num_commands=2):
            engine_thread._commands.put(run_again)
            thread = threading.Thread(target=lambda: responses.append(post(tiny_server, max_tokens=20)))
            thread.start()
        thread.join(60)
    assert responses[0].status_code == 200
    assert len(runs) == len(set(runs)) >= 19


def test_reads_run_one_between_two_steps(tiny_server):
    """A read takes long; submissions and cancellations do not wait for those that others queued."""
    engine_thread, engine = tiny_server.service.engine_thread, tiny_server.service.llm.engine
    runs, responses = [], []  # the number of steps at each read while requests are unfinished

    def read():
        if engine.has_unfinished_requests:
            runs.append(num_steps[0])

    with steps_counted(tiny_server) as num_steps:
        with engine_paused(tiny_server, num_commands=9):
            reads = [asyncio.run_coroutine_threadsafe(engine_thread.read(read), engine_thread._loop) for _ in range(8)]
            thread = threading.Thread(target=lambda: responses.append(post(tiny_server, max_tokens=20)))
            thread.start()
        for done in reads:
            done.result(60)
        thread.join(60)
    assert responses[0].status_code == 200
    assert len(runs) == len(set(runs)) >= 6


def test_failing_observer_is_ignored(tiny_server, monkeypatch):
    (metrics,) = tiny_server.service.engine_thread.observers
    for name in ("on_request", "on_step", "on_finish"):
        monkeypatch.setattr(metrics, name, lambda *_: 1 / 0)
    assert post(tiny_server).status_code == 200


def test_rejected_requests_are_not_tracked(tiny_server, monkeypatch):
    inspector = Inspector(tiny_server.service.llm)
    monkeypatch.setattr(tiny_server.service.engine_thread, "observers", [inspector])

    def refuse(request):
        raise ValueError("too large")

    monkeypatch.setattr(tiny_server.service.llm.engine.scheduler, "check_fits", refuse)
    for _ in range(3):
        assert post(tiny_server).status_code == 400
    run_in_engine_thread(tiny_server, lambda: None).result(60)
    assert not inspector.live


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_pages_fails_with_one_line(tiny_server, stream):
    """Though its plan said that it fits; the engine goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "reserve", lambda *_, **__: False)
        response = post(tiny_server, stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert "needs more KV memory than was planned" in response.text
    assert post(tiny_server).status_code == 200


def test_a_pin_that_is_not_held_is_told_to_who_set_it():
    """Whole pages of the prompt that are not kept are named in a header, and what is kept is in the usage."""
    with run_tiny_server(engine_options={"kv_memory": "1MiB"}) as server:
        prefix_cache, warnings = server.service.llm.cache.prefix_cache, []
        for i in range(12):
            response = post(server, prompt=[i + 1] * 256, pin=1000.0)
            num_pinned = response.json()["usage"]["prompt_tokens_details"]["pinned_tokens"]
            assert num_pinned in (0, 256)
            warning = response.headers.get("x-retain-warning")
            assert warning == (None if num_pinned else "pin: 0 of 256 tokens are kept")
            warnings.append(warning)
        pinned_pages = sum(node.all_pages.size for node in prefix_cache.tree.pins)
        prefix_cache.tree.unpin_all()
        assert 0 < pinned_pages <= server.service.llm.cache.total_pages / 2 and warnings[0] is None and warnings[-1]


def test_request_timeout(monkeypatch):
    """A response of 1000 slow steps ends at the timeout: full with 408, streamed with an error event."""
    with run_tiny_server(limits=Limits(request_timeout=1.5)) as server:
        runner = server.service.llm.engine.runner
        forward = runner.forward

        def forward_slowly(batch):
            time.sleep(0.02)
            return forward(batch)

        monkeypatch.setattr(runner, "forward", forward_slowly)
        assert post(server, max_tokens=1000).status_code == 408
        text = post(server, max_tokens=1000, stream=True).text
    assert text.count("data: {") > 1 and '"timeout_error"' in text.splitlines()[-2] and "[DONE]" not in text


def nested_json(depth):
    return "[" * depth + "]" * depth


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
def test_deeply_nested_body_is_rejected(tiny_server, path, body):
    headers = {"Content-Type": "application/json"}
    response = HTTP.post(f"{tiny_server.url}{path}", content=body, headers=headers)
    assert response.status_code == 400, response.text


def request_pattern(server, pattern, **fields):
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "aaaa"}],
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": pattern}}},
    }
    return HTTP.post(f"{server.url}/chat/completions", json={**body, **fields})


@pytest.mark.slow
def test_incomplete_object_is_never_returned_as_complete(server):
    """llguidance gives up on some expressions; half of an object must not pass for a whole one."""
    response = request_pattern(server, "((a{1,30}){1,30}){1,30}", max_tokens=100)
    if response.status_code == 200:
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "length" or choice["message"]["content"].endswith('"')
    else:
        assert response.status_code == 400 and "response_format" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_failure_is_an_error(tiny_server, monkeypatch, stream):
    monkeypatch.setattr(GrammarState, "accept_token", lambda self, token: False)
    response = request_pattern(tiny_server, "a+", stream=stream)
    error = json.loads(response.text.strip().removeprefix("data: "))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert response.status_code == (200 if stream else 400)


def test_cached_tokens_with_n(tiny_server):
    fields = {"prompt": STORY + "several", "temperature": 0}
    post(tiny_server, **fields)
    responses = [post(tiny_server, **fields, n=n).json() for n in (1, 2)]
    one, two = (response["usage"]["prompt_tokens_details"]["cached_tokens"] for response in responses)
    assert one == two > 100


def test_echo_logprobs_with_n(tiny_server):
    choices = post(tiny_server, prompt="The sea is wide", echo=True, logprobs=1, n=2, seed=1).json()["choices"]
    first, second = (c["logprobs"]["token_logprobs"][:4] for c in choices)
    assert first[0] is second[0] is None and first[1:] == pytest.approx(second[1:], abs=1e-4)
