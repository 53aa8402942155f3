"""Who may ask, and how much: keys, salts, limits. Whatever is sent, the pool's accounts balance."""

import asyncio
import http.client
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.server import keys as keyring
from retain.server.errors import Refused
from retain.server.limits import Gate, Limits
from tests.server.conftest import KEYS, balanced

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12


def post(server, path, body, key="ann", **options):
    headers = {"Authorization": f"Bearer {KEYS[key]}"} if key else {}
    root = server.url.removesuffix("/v1")
    return httpx.post(f"{root}{path}", json=body, headers=headers, timeout=120, **options)


def complete(server, key="ann", **more):
    body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 4, "temperature": 0, **more}
    return post(server, "/v1/completions", body, key)


def metric(server, name):
    text = httpx.get(
        f"{server.url.removesuffix('/v1')}/metrics", headers={"Authorization": f"Bearer {KEYS['ann']}"}
    ).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


def until(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong-wrong", f"Basic {KEYS['ann']}", KEYS["ann"], "Bearer é"]
)
def test_without_a_key_nothing_is_told(locked, header):
    root = locked.url.removesuffix("/v1")
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    for path in ("/v1/models", "/metrics"):
        said = httpx.get(f"{root}{path}", headers=headers)
        assert said.status_code == 401 and said.json()["error"]["type"] == "authentication_error"
    said = httpx.post(f"{root}/v1/completions", content=b"{", headers=headers)
    assert said.status_code == 401
    assert httpx.get(f"{root}/health").status_code == httpx.get(f"{root}/ready").status_code == 200


def test_keys_share_no_prefix_and_one_key_does(locked):
    def cached(key, **more):
        before = metric(locked, 'retain_prefix_hit_tokens_total{tier="pool"}')
        said = complete(locked, key, prompt=TEXT, max_tokens=1, **more).json()
        found = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert metric(locked, 'retain_prefix_hit_tokens_total{tier="pool"}') - before == found
        return found

    assert cached("ann") == 0 and cached("bob") == 0
    assert cached("ann") > 100 and cached("bob") > 100
    assert cached("ann", cache_salt="x") == 0 and cached("ann", cache_salt="x") > 100
    assert cached("bob", cache_salt="x") == 0


def test_what_one_key_asks_another_cannot_spell():
    """A salt of one key is no salt of another, whatever is written into cache_salt."""
    found = keyring.Keys(KEYS)
    ann, bob = (found.find(f"Bearer {k}") for k in KEYS.values())
    assert ann.name == "ann" and bob.name == "bob" and len({ann.salt, bob.salt}) == 2
    assert all(len(k.salt) == 64 for k in (ann, bob)), "of one length: no salt is the beginning of another"
    assert found.find("Bearer sk-ann-012345678") is None


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who may ask\nann sk-ann-0123456789\n\nsk-only-the-key\n")
    found = keyring.read(file, {keyring.VARIABLE: "eve:sk-eve-9876543210"})
    assert [k.name for _, k in found._known] == ["ann", "key2", "eve"]
    for text in (
        "a b c\n",
        "",
        "ann short\n",
        "ann sk-0123456789\nann sk-9876543210\n",
        "a sk-0123456789\nb sk-0123456789\n",
    ):
        file.write_text(text)
        with pytest.raises(ValueError):
            keyring.read(file, {})


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_a_gate_counts():
    gate = Gate(Limits(queue=2, per_key=3, choices=3), rows=2)
    with gate.enter("a", 3):
        with pytest.raises(Refused) as late:
            gate.enter("a", 1).__enter__()
        assert late.value.status == 429 and int(late.value.headers["Retry-After"]) >= 1
        with gate.enter("b", 1), pytest.raises(Refused) as full:
            gate.enter("c", 1).__enter__()
        assert full.value.status == 429 and "queue" in full.value.message
    assert gate.inside == 0
    with pytest.raises(Refused) as many:
        gate.enter("a", 4).__enter__()
    assert many.value.status == 400


def test_the_queue_is_bounded(locked):
    """Two run, two wait, and a fifth is told when to come again; the others end well."""
    found = []

    def ask(key):
        found.append(complete(locked, key, max_tokens=150, ignore_eos=True))

    threads = [threading.Thread(target=ask, args=(key,)) for key in ("ann", "ann", "bob", "bob")]
    for t in threads:
        t.start()
    until(lambda: locked.service.gate.inside == 4)
    late = complete(locked)
    assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
    for t in threads:
        t.join()
    assert [r.status_code for r in found] == [200] * 4
    until(lambda: locked.service.gate.inside == 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"n": 4}, 400),
        ({"max_tokens": 2001}, 400),
        ({"prompt": "x" * 100_001}, 413),
        ({"pin": 61}, 400),
    ],
)
def test_a_request_is_bounded(locked, body, status):
    said = complete(locked, **body)
    assert said.status_code == status and set(said.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_length_is_bounded_too(locked):
    def endless():
        for _ in range(20):
            yield b" " * 10_000

    said = httpx.post(
        f"{locked.url}/completions",
        content=endless(),
        headers={"Authorization": f"Bearer {KEYS['ann']}", "Content-Type": "application/json"},
    )
    assert said.status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for(locked):
    where = urlsplit(locked.url)
    with socket.create_connection((where.hostname, where.port)) as s:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['ann']}\r\n"
        s.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        s.settimeout(10)
        assert b" 408 " in s.recv(100)


def test_a_pin_keeps_a_prompt(locked):
    said = complete(locked, prompt=TEXT + "pinned", max_tokens=1, pin=30)
    assert said.json()["usage"]["prompt_tokens_details"]["pinned_tokens"] > 100
    assert locked.service.llm.cache.reuse.tree.unpin()


# ---- hanging up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_holds_nothing(locked, stream):
    where = urlsplit(locked.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    body = {"model": "smollm2", "prompt": TEXT + str(stream), "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {KEYS['ann']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    until(lambda: locked.service.llm.engine.scheduler.running)
    if stream:
        connection.getresponse().read(50)
    connection.close()
    until(lambda: locked.service.gate.inside == 0 and not locked.service.llm.engine.busy)
    balanced(locked)


# ---- whatever is sent ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=6), kids, max_size=3),
    max_leaves=6,
)
GOOD = {
    "/v1/completions": {"model": "smollm2", "prompt": "The sea", "max_tokens": 2},
    "/v1/chat/completions": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
FIELDS = (
    "model prompt messages max_tokens temperature top_p n stop stream seed logprobs echo logit_bias kv_policy tools "
    "speculate cache_salt pin response_format tool_choice top_logprobs stream_options tokens suffix best_of x"
)


@st.composite
def bodies(draw):
    """A good body, of which something is not."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body = dict(GOOD[path])
    for field in draw(st.lists(st.sampled_from(FIELDS.split()), min_size=1, max_size=3)):
        body[field] = draw(JSON)
    text = json.dumps(body)
    cut = draw(st.one_of(st.none(), st.integers(0, len(text))))
    return path, text if cut is None else text[:cut]


@pytest.fixture(scope="module")
def line(server):
    """One connection: a thousand bodies in a few seconds."""
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=120) as client:
        yield client


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies())
def test_what_is_malformed_is_refused_and_costs_nothing(server, line, asked):
    path, text = asked
    said = line.post(path, content=text.encode(errors="surrogatepass"), headers={"Content-Type": "application/json"})
    assert said.status_code in (200, 400, 404), (said.status_code, said.text)
    if said.status_code != 200:
        message = said.json()["error"]["message"]
        assert message and "\n" not in message and "/" not in message.replace("/v1/models", "")


def test_after_all_that_the_accounts_balance(server):
    until(lambda: not server.service.llm.engine.busy)
    balanced(server)


def test_a_step_that_fails_ends_only_who_ran(locked, monkeypatch):
    """And those that wait go on."""
    engine, worker = locked.service.llm.engine, locked.service.worker
    forward, failed = engine.runner.forward, []

    def fail(batch):
        if len(batch.rows) == 2 and not failed:
            failed.append(1)
            raise RuntimeError("a bug at /secret/path")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail)
    found = []
    ask = lambda: found.append(complete(locked, max_tokens=30, ignore_eos=True))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    codes = sorted(r.status_code for r in found)
    assert failed and codes == [200, 500, 500]
    assert all("secret" not in r.text for r in found) and worker.broken is None
    assert asyncio.run_coroutine_threadsafe(worker.call(lambda: engine.busy), worker._loop).result(60) is False
