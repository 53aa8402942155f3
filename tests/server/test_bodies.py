"""Bodies as clients send them: JSON whatever its content-type says, and words of our own for what is none."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from retain.server.launch import GracefulServer
from tests.server.conftest import HTTP

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/v1/completions/render": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hello"},
}
FORM = "application/x-www-form-urlencoded"  # what `curl -d` says
TYPES = [FORM, "text/plain", "application/json; charset=latin-1", "application/octet-stream", "", None]


def post(server: GracefulServer, path: str, content: bytes, **headers: str | None) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    return HTTP.post(f"{server.url.removesuffix('/v1')}{path}", content=content, headers=named)


def encode(path: str) -> bytes:
    return json.dumps({"model": "smollm2", **BODIES[path]}).encode()


def test_every_route_with_a_body_is_tested(tiny_server: GracefulServer) -> None:
    document = HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/openapi.json").json()
    paths = {path for path, operations in document["paths"].items() if "requestBody" in operations.get("post", {})}
    alike = {"/v1/chat/completions/render", "/v1/responses/render", "/detokenize"}  # as their neighbours
    alike |= {"/v1/cache/{action}", "/v1/cache/reset"}  # by the same route class
    pooled = {"/v1/embeddings", "/v1/rerank", "/v1/score"}  # of other models, by the same route class
    assert paths - alike - pooled == BODIES.keys()


@pytest.mark.parametrize("path", BODIES)
def test_json_is_accepted_whatever_its_content_type_says(path: str, tiny_server: GracefulServer) -> None:
    for content_type in TYPES:
        response = post(tiny_server, path, encode(path), content_type=content_type)
        assert response.status_code == 200, (content_type, response.text)
    assert post(tiny_server, path, b"\xef\xbb\xbf" + encode(path)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the request body is empty: send a JSON object"),
        (b"model=smollm2&prompt=Hello", "the request body is not valid JSON"),
        (b"{'model': 'smollm2'}", "the request body is not valid JSON"),
        (b'{"model": "\xe9"}', "the request body is not UTF-8 text: byte 11 is not"),
        ('{"model": "x"}'.encode("utf-16"), "the request body is not UTF-8 text: byte 0 is not"),
        (b'["smollm2"]', "the request body is JSON, but no object: send {...}"),
        (b'"smollm2"', "the request body is JSON, but no object: send {...}"),
    ],
)
def test_what_is_no_json_object_is_refused_in_our_words(
    path: str, content: bytes, message: str, tiny_server: GracefulServer
) -> None:
    for content_type in (FORM, "application/json", None):
        response = post(tiny_server, path, content, content_type=content_type)
        assert response.status_code == 400 and response.json()["error"]["message"] == message
        assert ("type" in response.json()) == path.startswith("/v1/messages")  # Anthropic's format


@pytest.mark.parametrize("path", BODIES)
def test_compressed_bodies_are_refused_in_words(path: str, tiny_server: GracefulServer) -> None:
    response = post(tiny_server, path, gzip.compress(encode(path)), content_encoding="gzip")
    assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"] == "content-encoding gzip is not supported: send the body uncompressed"
    assert post(tiny_server, path, encode(path), content_encoding="identity").status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_page_of_another_origin_cannot_send_without_asking(path: str, tiny_server: GracefulServer) -> None:
    """A browser sends these content-types without asking the server before (CORS), and JSON only after."""
    for content_type in (FORM, "text/plain", "multipart/form-data", None):
        response = post(tiny_server, path, encode(path), content_type=content_type, origin="http://evil.example")
        assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
    response = post(tiny_server, path, encode(path), content_type="application/json", origin="http://evil.example")
    assert response.status_code == 200


def test_head_is_answered_as_get_without_the_body(tiny_server: GracefulServer) -> None:
    root = tiny_server.url.removesuffix("/v1")
    paths = HTTP.get(f"{root}/openapi.json").json()["paths"]
    gets = [path.replace("{model}", "smollm2") for path, operations in paths.items() if "get" in operations]
    assert {"/health", "/ready", "/metrics", "/v1/models", "/v1/models/smollm2"} <= {*gets}
    for path in [*gets, "/openapi.json", "/v1/models/other", "/nowhere", "/v1/chat/completions"]:
        head, get = HTTP.head(f"{root}{path}"), HTTP.get(f"{root}{path}")
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert HTTP.get(f"{root}/health").json() == {"status": "ok"}  # the connection is in order


def test_head_needs_the_key_that_get_needs(secured_server: GracefulServer) -> None:
    root = secured_server.url.removesuffix("/v1")
    assert HTTP.head(f"{root}/health").status_code == HTTP.head(f"{root}/inspect").status_code == 200
    assert HTTP.head(f"{root}/v1/models").status_code == HTTP.head(f"{root}/metrics").status_code == 401
