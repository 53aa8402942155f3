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

from retain.server import auth as keyring
from retain.server.admission import AdmissionControl, Limits
from retain.server.openai.errors import APIError
from tests.server.conftest import API_KEYS, assert_nothing_leaked

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12


def post(server, path, body, key_name="ann", **options):
    headers = {"Authorization": f"Bearer {API_KEYS[key_name]}"} if key_name else {}
    root = server.url.removesuffix("/v1")
    return httpx.post(f"{root}{path}", json=body, headers=headers, timeout=120, **options)


def complete(server, key_name="ann", **fields):
    body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 4, "temperature": 0, **fields}
    return post(server, "/v1/completions", body, key_name)


def read_metric(server, name):
    text = httpx.get(
        f"{server.url.removesuffix('/v1')}/metrics", headers={"Authorization": f"Bearer {API_KEYS['ann']}"}
    ).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong-wrong", f"Basic {API_KEYS['ann']}", API_KEYS["ann"], "Bearer é"]
)
def test_missing_or_wrong_key_is_401(secured_server, header):
    root = secured_server.url.removesuffix("/v1")
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    for path in ("/v1/models", "/metrics"):
        said = httpx.get(f"{root}{path}", headers=headers)
        assert said.status_code == 401 and said.json()["error"]["type"] == "authentication_error"
    said = httpx.post(f"{root}/v1/completions", content=b"{", headers=headers)
    assert said.status_code == 401
    assert httpx.get(f"{root}/health").status_code == httpx.get(f"{root}/ready").status_code == 200


def test_prefixes_are_shared_only_within_a_key(secured_server):
    def cached(key, **more):
        before = read_metric(secured_server, 'retain_prefix_hit_tokens_total{tier="pool"}')
        said = complete(secured_server, key, prompt=TEXT, max_tokens=1, **more).json()
        found = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert read_metric(secured_server, 'retain_prefix_hit_tokens_total{tier="pool"}') - before == found
        return found

    assert cached("ann") == 0 and cached("bob") == 0
    assert cached("ann") > 100 and cached("bob") > 100
    assert cached("ann", cache_salt="x") == 0 and cached("ann", cache_salt="x") > 100
    assert cached("bob", cache_salt="x") == 0


def test_salts_of_keys_differ():
    """A salt of one key is no salt of another, whatever is written into cache_salt."""
    found = keyring.ApiKeys(API_KEYS)
    ann, bob = (found.authenticate(f"Bearer {k}") for k in API_KEYS.values())
    assert ann.name == "ann" and bob.name == "bob" and len({ann.salt, bob.salt}) == 2
    assert all(len(k.salt) == 64 for k in (ann, bob)), "of one length: no salt is the beginning of another"
    assert found.authenticate("Bearer sk-ann-012345678") is None


def test_load_api_keys_from_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# who may ask\nann sk-ann-0123456789\n\nsk-only-the-key\n")
    found = keyring.load_api_keys(file, {keyring.API_KEYS_ENV: "eve:sk-eve-9876543210"})
    assert [k.name for _, k in found._hashed_keys] == ["ann", "key2", "eve"]
    for text in (
        "a b c\n",
        "",
        "ann short\n",
        "ann sk-0123456789\nann sk-9876543210\n",
        "a sk-0123456789\nb sk-0123456789\n",
    ):
        file.write_text(text)
        with pytest.raises(ValueError):
            keyring.load_api_keys(file, {})


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_admission_control_limits():
    gate = AdmissionControl(
        Limits(max_queued_requests=2, max_requests_per_key=3, max_choices=3), max_running_requests=2
    )
    with gate.admit("a", 3):
        with pytest.raises(APIError) as late:
            gate.admit("a", 1).__enter__()
        assert late.value.status == 429 and int(late.value.headers["Retry-After"]) >= 1
        with gate.admit("b", 1), pytest.raises(APIError) as full:
            gate.admit("c", 1).__enter__()
        assert full.value.status == 429 and "queue" in full.value.message
    assert gate.num_in_flight == 0
    with pytest.raises(APIError) as many:
        gate.admit("a", 4).__enter__()
    assert many.value.status == 400


def test_full_queue_is_429(secured_server):
    """Two run, two wait, and a fifth is told when to come again; the others end well."""
    found = []

    def ask(key):
        found.append(complete(secured_server, key, max_tokens=150, ignore_eos=True))

    threads = [threading.Thread(target=ask, args=(key,)) for key in ("ann", "ann", "bob", "bob")]
    for t in threads:
        t.start()
    wait_until(lambda: secured_server.service.gate.inside == 4)
    late = complete(secured_server)
    assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
    for t in threads:
        t.join()
    assert [r.status_code for r in found] == [200] * 4
    wait_until(lambda: secured_server.service.gate.inside == 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"n": 4}, 400),
        ({"max_tokens": 2001}, 400),
        ({"prompt": "x" * 100_001}, 413),
        ({"pin": 61}, 400),
    ],
)
def test_request_limits(secured_server, body, status):
    said = complete(secured_server, **body)
    assert said.status_code == status and set(said.json()["error"]) == {"message", "type", "param", "code"}


def test_chunked_body_is_limited(secured_server):
    def endless():
        for _ in range(20):
            yield b" " * 10_000

    said = httpx.post(
        f"{secured_server.url}/completions",
        content=endless(),
        headers={"Authorization": f"Bearer {API_KEYS['ann']}", "Content-Type": "application/json"},
    )
    assert said.status_code == 413


def test_upload_timeout(secured_server):
    where = urlsplit(secured_server.url)
    with socket.create_connection((where.hostname, where.port)) as s:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEYS['ann']}\r\n"
        s.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        s.settimeout(10)
        assert b" 408 " in s.recv(100)


def test_pin_keeps_prompt_cached(secured_server):
    said = complete(secured_server, prompt=TEXT + "pinned", max_tokens=1, pin=30)
    assert said.json()["usage"]["prompt_tokens_details"]["pinned_tokens"] > 100
    assert secured_server.service.llm.cache.reuse.tree.unpin()


# ---- hanging up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(secured_server, stream):
    where = urlsplit(secured_server.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    body = {"model": "smollm2", "prompt": TEXT + str(stream), "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {API_KEYS['ann']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    wait_until(lambda: secured_server.service.llm.engine.scheduler.running)
    if stream:
        connection.getresponse().read(50)
    connection.close()
    wait_until(lambda: secured_server.service.gate.inside == 0 and not secured_server.service.llm.engine.busy)
    assert_nothing_leaked(secured_server)


# ---- whatever is sent ------------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=6), kids, max_size=3),
    max_leaves=6,
)
VALID_BODIES = {
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
def malformed_bodies(draw):
    """A good body, of which something is not."""
    path = draw(st.sampled_from(sorted(VALID_BODIES)))
    body = dict(VALID_BODIES[path])
    for field in draw(st.lists(st.sampled_from(FIELDS.split()), min_size=1, max_size=3)):
        body[field] = draw(JSON_VALUES)
    text = json.dumps(body)
    cut = draw(st.one_of(st.none(), st.integers(0, len(text))))
    return path, text if cut is None else text[:cut]


@pytest.fixture(scope="module")
def http_client(server):
    """One connection: a thousand bodies in a few seconds."""
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=120) as client:
        yield client


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(malformed_bodies())
def test_malformed_bodies_are_rejected(server, http_client, path_and_body):
    path, text = path_and_body
    said = http_client.post(
        path, content=text.encode(errors="surrogatepass"), headers={"Content-Type": "application/json"}
    )
    assert said.status_code in (200, 400, 404), (said.status_code, said.text)
    if said.status_code != 200:
        message = said.json()["error"]["message"]
        assert message and "\n" not in message and "/" not in message.replace("/v1/models", "")


def test_no_leaks_after_malformed_bodies(server):
    wait_until(lambda: not server.service.llm.engine.busy)
    assert_nothing_leaked(server)


def test_failing_step_ends_only_running_requests(secured_server, monkeypatch):
    """And those that wait go on."""
    engine, worker = secured_server.service.llm.engine, secured_server.service.worker
    forward, failed = engine.runner.forward, []

    def fail(batch):
        if len(batch.rows) == 2 and not failed:
            failed.append(1)
            raise RuntimeError("a bug at /secret/path")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail)
    found = []
    ask = lambda: found.append(complete(secured_server, max_tokens=30, ignore_eos=True))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    codes = sorted(r.status_code for r in found)
    assert failed and codes == [200, 500, 500]
    assert all("secret" not in r.text for r in found) and worker.broken is None
    assert asyncio.run_coroutine_threadsafe(worker.call(lambda: engine.busy), worker._loop).result(60) is False
