"""API keys, salts and limits. Whatever is sent, no page leaks."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.server.admission import AdmissionControl
from retain.server.auth import API_KEYS_ENV, ApiKeys, load_api_keys
from retain.server.config import Limits
from retain.server.openai.errors import APIError
from tests.server.conftest import (
    API_KEYS,
    HTTP,
    assert_nothing_leaked,
    engine_paused,
    run_in_engine_thread,
    run_tiny_server,
    wait_until,
)

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8


def post(server, path, body, key_name="ann", **options):
    headers = {"Authorization": f"Bearer {API_KEYS[key_name]}"} if key_name else {}
    root = server.url.removesuffix("/v1")
    return HTTP.post(f"{root}{path}", json=body, headers=headers, **options)


def complete(server, key_name="ann", **fields):
    body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 4, "temperature": 0, **fields}
    return post(server, "/v1/completions", body, key_name)


def read_metric(server, name):
    headers = {"Authorization": f"Bearer {API_KEYS['ann']}"}
    text = HTTP.get(f"{server.url.removesuffix('/v1')}/metrics", headers=headers).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


# ---- API keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong-wrong", f"Basic {API_KEYS['ann']}", API_KEYS["ann"], "Bearer é"]
)
def test_missing_or_wrong_key_is_401(secured_server, header):
    root = secured_server.url.removesuffix("/v1")
    headers = {"Authorization": header.encode("latin-1")} if header is not None else {}
    for path in ("/v1/models", "/metrics"):
        response = HTTP.get(f"{root}{path}", headers=headers)
        assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    assert HTTP.post(f"{root}/v1/completions", content=b"{", headers=headers).status_code == 401
    assert HTTP.get(f"{root}/health").status_code == HTTP.get(f"{root}/ready").status_code == 200
    assert "/v1/chat/completions" in HTTP.get(f"{root}/").text


def test_prefixes_are_shared_only_within_a_key(secured_server):
    def count_cached_tokens(key_name, **fields):
        metric = "vllm:prefix_cache_hits_total"
        before = read_metric(secured_server, metric)
        usage = complete(secured_server, key_name, prompt=TEXT, max_tokens=1, **fields).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert read_metric(secured_server, metric) - before == cached
        return cached

    assert count_cached_tokens("ann") == 0 and count_cached_tokens("bob") == 0
    assert count_cached_tokens("ann") > 100 and count_cached_tokens("bob") > 100
    assert count_cached_tokens("ann", cache_salt="x") == 0 and count_cached_tokens("ann", cache_salt="x") > 100
    assert count_cached_tokens("bob", cache_salt="x") == 0


def test_salts_of_keys_differ():
    """A key's salt with any cache_salt never equals another key's salt."""
    keys = ApiKeys(API_KEYS)
    ann, bob = (keys.authenticate(f"Bearer {key}") for key in API_KEYS.values())
    assert ann.name == "ann" and bob.name == "bob" and len({ann.salt, bob.salt}) == 2
    assert all(len(key.salt) == 64 for key in (ann, bob)), "of one length: no salt begins with another"
    assert keys.authenticate("Bearer sk-ann-012345678") is None


def test_load_api_keys_from_file_and_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# a comment\nann sk-ann-0123456789\n\nsk-only-the-key\n")
    keys = load_api_keys(file, {API_KEYS_ENV: "eve:sk-eve-9876543210"})
    assert [key.name for _, key in keys._hashed_keys] == ["ann", "key2", "eve"]
    duplicate_name = "ann sk-0123456789\nann sk-9876543210\n"
    duplicate_key = "a sk-0123456789\nb sk-0123456789\n"
    for text in ("a b c\n", "", "ann short\n", duplicate_name, duplicate_key):
        file.write_text(text)
        with pytest.raises(ValueError):
            load_api_keys(file, {})


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_admission_control_limits():
    admission = AdmissionControl(
        Limits(max_queued_requests=2, max_requests_per_key=3, max_choices=3), max_running_requests=2
    )
    with admission.open("a") as three:
        three.admit(3)
        with pytest.raises(APIError) as per_key:
            admission.open("a").admit(1)
        assert per_key.value.status == 429 and int(per_key.value.headers["Retry-After"]) >= 1
        with admission.open("b") as one, pytest.raises(APIError) as full:
            one.admit(1)
            admission.open("c").admit(1)
        assert full.value.status == 429 and "queue" in full.value.message
    assert admission.num_in_flight == 0
    with pytest.raises(APIError) as too_many:
        admission.open("a").admit(4)
    assert too_many.value.status == 400


def test_rejections_are_logged_as_counts(caplog):
    admission = AdmissionControl(Limits(max_choices=3), max_running_requests=2)
    for _ in range(102):
        with pytest.raises(APIError):
            admission.open("a-name-of-a-key").admit(4)
    first, last = (r.getMessage() for r in caplog.records if r.name == "retain.server.admission")
    assert "max_choices (1 in total)" in first and "max_choices (101 in total)" in last
    assert "a-name-of-a-key" not in caplog.text


def test_full_queue_is_429(secured_server, monkeypatch):
    """Two requests may run and two may wait; a fifth is rejected with Retry-After. The four finish normally."""
    monkeypatch.setattr(secured_server.service.admission, "num_keys", 1)  # nobody needs room
    responses = []

    def generate(key_name):
        responses.append(complete(secured_server, key_name))

    threads = [threading.Thread(target=generate, args=(name,)) for name in ("ann", "ann", "bob", "bob")]
    with engine_paused(secured_server):
        for t in threads:
            t.start()
        wait_until(lambda: secured_server.service.admission.num_in_flight == 4)
        late = complete(secured_server)
        assert late.status_code == 429 and int(late.headers["retry-after"]) >= 1
    for t in threads:
        t.join()
    assert [r.status_code for r in responses] == [200] * 4
    wait_until(lambda: secured_server.service.admission.num_in_flight == 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"n": 4}, 400), ({"prompt": "x" * 100_001}, 413), ({"pin": 61}, 400)],
)
def test_request_over_a_limit_is_rejected(secured_server, fields, status):
    response = complete(secured_server, **fields)
    assert response.status_code == status and set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_chunked_body_is_limited(secured_server):
    response = HTTP.post(
        f"{secured_server.url}/completions",
        content=(b" " * 10_000 for _ in range(20)),
        headers={"Authorization": f"Bearer {API_KEYS['ann']}", "Content-Type": "application/json"},
    )
    assert response.status_code == 413


def test_upload_timeout():
    """A server of its own: on a busy machine the bodies of other tests may take as long."""
    limits = Limits(upload_timeout=0.5)
    with run_tiny_server(api_keys=ApiKeys(API_KEYS), limits=limits) as server:
        url = urlsplit(server.url)
        with socket.create_connection((url.hostname, url.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEYS['ann']}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
            connection.settimeout(10)
            assert b" 408 " in connection.recv(100)


def test_pin_keeps_prompt_cached(secured_server):
    response = complete(secured_server, prompt=TEXT + "pinned", max_tokens=1, pin=30)
    assert response.json()["usage"]["prompt_tokens_details"]["pinned_tokens"] > 100
    assert secured_server.service.llm.cache.prefix_cache.tree.unpin_all()


# ---- disconnects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_pages(secured_server, stream):
    url, service = urlsplit(secured_server.url), secured_server.service
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {"model": "smollm2", "prompt": TEXT + str(stream), "max_tokens": 1400, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {API_KEYS['ann']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    wait_until(lambda: service.llm.engine.scheduler.running)
    if stream:
        connection.getresponse().read(50)
    connection.close()
    wait_until(lambda: service.admission.num_in_flight == 0 and not service.llm.engine.has_unfinished_requests)
    assert_nothing_leaked(secured_server)


# ---- malformed bodies ------------------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text(max_size=6), kids, max_size=3),
    max_leaves=6,
)
VALID_BODIES = {
    "/v1/completions": {"model": "smollm2", "prompt": "The sea", "max_tokens": 2},
    "/v1/chat/completions": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "smollm2", "input": "x", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
FIELDS = (
    "model prompt messages max_tokens temperature top_p n stop stream seed logprobs echo logit_bias kv_policy tools "
    "speculate cache_salt pin response_format tool_choice top_logprobs stream_options tokens suffix best_of x "
    "system thinking cache_control stop_sequences output_config metadata input instructions previous_response_id "
    "max_output_tokens include text store"
)


@st.composite
def malformed_bodies(draw):
    """A valid body with some random fields, and perhaps cut short."""
    path = draw(st.sampled_from(sorted(VALID_BODIES)))
    body = dict(VALID_BODIES[path])
    for field in draw(st.lists(st.sampled_from(FIELDS.split()), min_size=1, max_size=3)):
        body[field] = draw(JSON_VALUES)
    text = json.dumps(body)
    cut = draw(st.one_of(st.none(), st.integers(0, len(text))))
    return path, text if cut is None else text[:cut]


def assert_malformed_bodies_are_rejected(server, max_examples):
    """Send bodies on one connection. Errors are 400 or 404 with a one-line message, and no page leaks."""

    @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck))
    @given(malformed_bodies())
    def check(path_and_text):
        path, text = path_and_text
        headers = {"Content-Type": "application/json"}
        response = client.post(path, content=text.encode(errors="surrogatepass"), headers=headers)
        assert response.status_code in (200, 400, 404), (response.status_code, response.text)
        if response.status_code != 200:
            message = response.json()["error"]["message"]
            words = message.partition(": ")[2] or message  # behind the name of a field, which the client chose
            assert message and "\n" not in message and "/" not in words.replace("/v1/models", "")

    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=120) as client:
        check()
    wait_until(lambda: not server.service.llm.engine.has_unfinished_requests)
    assert_nothing_leaked(server)


@pytest.mark.slow
def test_malformed_bodies_are_rejected_by_tiny_model(tiny_server):
    assert_malformed_bodies_are_rejected(tiny_server, 50)


@pytest.mark.slow
def test_malformed_bodies_are_rejected(server):
    assert_malformed_bodies_are_rejected(server, 200)


def test_failing_step_fails_only_running_requests(secured_server, monkeypatch):
    """Two requests run when a step raises; a third waits, and finishes normally."""
    monkeypatch.setattr(secured_server.service.admission, "num_keys", 1)  # nobody needs room
    engine, engine_thread = secured_server.service.llm.engine, secured_server.service.engine_thread
    forward, failed = engine.runner.forward, []

    def fail(batch):
        if len(batch.rows) == 2 and not failed:
            failed.append(1)
            raise RuntimeError("a bug at /secret/path")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail)
    responses = []

    def generate():
        responses.append(complete(secured_server, ignore_eos=True))

    threads = [threading.Thread(target=generate) for _ in range(3)]
    with engine_paused(secured_server, num_commands=3):
        for t in threads:
            t.start()
    for t in threads:
        t.join()
    assert failed and sorted(r.status_code for r in responses) == [200, 500, 500]
    assert all("secret" not in r.text for r in responses) and engine_thread.fatal_error is None
    assert run_in_engine_thread(secured_server, lambda: engine.has_unfinished_requests).result(60) is False
