"""What gateways ask of a server: prompts as token ids, early refusals, readiness."""

import socket
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import HTTP, engine_paused

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time there was a lamp that nobody could put out. " * 20


def post(server, path, body):
    response = HTTP.post(f"{server.url}{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


# ---- rendering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": MESSAGES}),
        ("/completions", {"prompt": STORY}),
        ("/responses", {"input": "What is the capital of France?", "instructions": "Be brief."}),
    ],
)
def test_rendered_tokens_are_those_that_the_engine_computes(server, path, body):
    """As a prompt of their own they begin with what the request has left in the cache."""
    body = {"model": "smollm2", **body}
    limit = {"max_output_tokens" if path == "/responses" else "max_tokens": 1}
    rendered = post(server, f"{path}/render", body)
    (rendered,) = rendered if isinstance(rendered, list) else [rendered]
    usage = post(server, path, body | limit)["usage"]
    num_tokens = usage.get("prompt_tokens") or usage["input_tokens"]
    assert len(rendered["token_ids"]) == num_tokens and rendered["model"] == "smollm2"
    again = {"model": "smollm2", "prompt": rendered["token_ids"], "max_tokens": 1}
    cached = post(server, "/completions", again)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == num_tokens - 1


def test_every_prompt_is_rendered(tiny_server):
    body = {"model": "smollm2", "prompt": ["one", "two words"], "max_tokens": 7}
    rendered = post(tiny_server, "/completions/render", body)
    encode = tiny_server.service.llm.encode
    assert [r["token_ids"] for r in rendered] == [encode(p) for p in body["prompt"]]
    assert all(r["sampling_params"]["max_tokens"] == 7 for r in rendered)
    assert len({r["request_id"] for r in rendered}) == 2


def test_rendering_generates_nothing(tiny_server):
    with engine_paused(tiny_server):  # and needs no engine
        assert post(tiny_server, "/chat/completions/render", {"model": "smollm2", "messages": MESSAGES})["token_ids"]
    assert not tiny_server.service.llm.engine.has_unfinished_requests


def test_an_invalid_request_is_not_rendered(tiny_server):
    for body, status in (({"prompt": "x", "model": "other"}, 404), ({"prompt": "x", "kv_policy": "no"}, 400)):
        response = HTTP.post(f"{tiny_server.url}/completions/render", json={"model": "smollm2"} | body)
        assert response.status_code == status and response.json()["error"]["message"]


# ---- early refusals --------------------------------------------------------------------------------------------------


def send_headers(server, path, content_length):
    """Send the head of a request and no byte of its body. Returns the connection."""
    url = urlsplit(server.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {content_length}\r\n\r\n".encode())
    return connection


PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions/render",
    "/tokenize",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_full_server_refuses_before_the_body(tiny_server, monkeypatch, path):
    monkeypatch.setattr(tiny_server.service.admission, "max_in_flight", 0)
    with send_headers(tiny_server, path, content_length=1_000_000) as connection:
        answer = connection.recv(2**16).decode().lower()
    assert answer.startswith("http/1.1 429 ") and "\r\nretry-after: " in answer


@pytest.mark.parametrize("path", PATHS)
def test_a_draining_server_refuses_before_the_body(tiny_server, monkeypatch, path):
    monkeypatch.setattr(tiny_server.service.admission, "closed", True)
    with send_headers(tiny_server, path, content_length=1_000_000) as connection:
        answer = connection.recv(2**16).decode().lower()
    assert answer.startswith("http/1.1 503 ") and "\r\nretry-after: " in answer
    assert HTTP.get(tiny_server.url.removesuffix("/v1") + "/ready").status_code == 503
    assert HTTP.get(tiny_server.url.removesuffix("/v1") + "/health").status_code == 200
