"""What a client sends comes back in an error only cut and on one line, and no bytes in a header fail the server."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retain.server.anthropic.errors import to_error_json
from retain.server.launch import GracefulServer
from retain.server.openai.errors import MAX_MESSAGE_LENGTH, APIError, invalid_request
from tests.server.conftest import API_KEYS, HTTP

LONG = "x\ny" * 40_000
MAX_ERROR = 4 * MAX_MESSAGE_LENGTH  # characters of an error as JSON: two texts, escaped
USER = {"role": "user", "content": "x"}
CHAT = {"model": "smollm2", "messages": [USER]}
MESSAGES = {"model": "smollm2", "messages": [USER], "max_tokens": 1}
RESPONSES = {"model": "smollm2", "input": "x"}


def tool_of(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": LONG, "content": "x"}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{**USER, LONG: 1}]}),
    ("/v1/chat/completions", {**CHAT, "messages": [{**USER, "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {**CHAT, LONG: 1}),
    ("/v1/chat/completions", {**CHAT, "model": LONG}),
    ("/v1/chat/completions", {**CHAT, "kv_policy": LONG}),
    ("/v1/chat/completions", {**CHAT, "kv_policy": f"h2o:{LONG}=1"}),
    ("/v1/chat/completions", {**CHAT, "kv_policy": f"h2o:budget={LONG}"}),
    ("/v1/chat/completions", {**CHAT, "speculate": LONG}),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {LONG: 1}}),
    ("/v1/chat/completions", {**CHAT, "reasoning_effort": LONG}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": LONG}}),
    ("/v1/chat/completions", {**CHAT, "response_format": schema_of({"$ref": LONG})}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": LONG}]}),
    ("/v1/chat/completions", {**CHAT, "tools": [tool_of(parameters={"type": LONG})], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "tool_choice": LONG}),
    ("/v1/completions", {"model": "smollm2", "prompt": "x", "stop": {LONG: LONG}}),
    ("/v1/completions", {"model": "smollm2", "prompt": "x", LONG: LONG}),
    ("/v1/responses", {**RESPONSES, "previous_response_id": LONG}),
    ("/v1/responses", {**RESPONSES, "input": [{"type": LONG}]}),
    ("/v1/responses", {**RESPONSES, "input": [{"type": "item_reference", "id": LONG}]}),
    ("/v1/responses", {**RESPONSES, "input": [{"role": LONG, "content": "x"}]}),
    ("/v1/responses", {**RESPONSES, "tools": [{"type": LONG}], "tool_choice": {"type": LONG}}),
    ("/v1/messages", {**MESSAGES, "messages": [{"role": LONG, "content": "x"}]}),
    ("/v1/messages", {**MESSAGES, "messages": [{**USER, "content": [{"type": LONG}]}]}),
    ("/v1/messages", {**MESSAGES, "model": LONG}),
    ("/v1/messages", {**MESSAGES, LONG: 1}),
    ("/v1/messages", {**MESSAGES, "thinking": {"type": LONG}}),
    ("/v1/messages", {**MESSAGES, "tools": [{"type": LONG, "name": LONG}]}),
    ("/v1/messages", {**MESSAGES, "tool_choice": {"type": "tool", "name": LONG}}),
    ("/tokenize", {"prompt": "x", LONG: 1}),
    ("/detokenize", {"tokens": [LONG]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES, ids=range(len(BODIES)))
def test_an_error_quotes_little_of_a_body(path: str, body: dict[str, Any], tiny_server: GracefulServer) -> None:
    response = HTTP.post(tiny_server.url.removesuffix("/v1") + path, json=body)
    assert len(response.text) < MAX_ERROR and response.status_code < 500
    if response.status_code != 200:
        assert "\n" not in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["v1/models/{}", "v1/responses/{}", "v1/responses/x/input_items?order={}", "{}"])
def test_an_error_quotes_little_of_an_address(path: str, tiny_server: GracefulServer) -> None:
    response = HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/{path.format('x' * 50_000)}")
    assert 400 <= response.status_code < 500 and len(response.text) < MAX_ERROR


@given(st.text(), st.text(), st.integers(1, 1000))
def test_every_message_is_one_short_line(text: str, param: str, repetitions: int) -> None:
    for error in (
        APIError(400, text * repetitions, param * repetitions),
        invalid_request(ValueError(text * repetitions)),
    ):
        details = error.to_dict()["error"]
        for quoted in (details["message"], details["param"] or "", to_error_json(error)["error"]["message"]):
            assert len(quoted) <= MAX_MESSAGE_LENGTH + len("...") and len(quoted.splitlines()) <= 1


# ---- headers ---------------------------------------------------------------------------------------------------------

# Those that are read here, and those that gateways and clients send.
HEADERS = [
    *("authorization", "x-api-key", "host", "origin", "sec-fetch-site", "connection", "expect", "transfer-encoding"),
    *("content-type", "content-length", "content-encoding", "x-session-id", "x-request-id", "traceparent"),
    *("anthropic-version", "anthropic-beta", "user-agent", "x-forwarded-for"),
]
VALUES = st.binary(max_size=40).map(lambda data: data.translate(None, b"\r\n\0"))
REQUESTS = [
    ("GET", "/v1/models", b""),
    ("GET", "/inspect/playground?run=1", b""),
    ("POST", "/v1/completions", b'{"model":"smollm2","prompt":"x","max_tokens":1}'),
    ("POST", "/v1/messages", b"{}"),
]


def send_header(server: GracefulServer, request: tuple[str, str, bytes], name: str, value: bytes) -> bytes:
    """Return the beginning of the answer to a request with this header, whatever bytes it has."""
    method, path, body = request
    headers = {"host": b"localhost", "authorization": f"Bearer {API_KEYS['ann']}".encode()}
    headers |= {"content-length": str(len(body)).encode(), "connection": b"close", name: value}
    head = f"{method} {path} HTTP/1.1\r\n".encode() + b"".join(
        b"%s: %s\r\n" % (name.encode(), value) for name, value in headers.items()
    )
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.settimeout(30)
        connection.sendall(head + b"\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        try:
            return connection.recv(2**16)
        except ConnectionResetError:  # half a body
            return b""


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(HEADERS), VALUES, st.sampled_from(REQUESTS))
def test_no_bytes_of_a_header_are_an_error_of_the_server(
    secured_server: GracefulServer, name: str, value: bytes, request_sent: tuple[str, str, bytes]
) -> None:
    answer = send_header(secured_server, request_sent, name, value)
    assert not answer or 100 <= int(answer.split()[1]) < 500, answer


def test_names_of_any_language_that_are_left_out_are_warned_of(tiny_server: GracefulServer) -> None:
    body = {**MESSAGES, "mcp_servers": [{"type": "url", "name": "日本 é", "url": "http://localhost"}]}
    response: httpx.Response = HTTP.post(f"{tiny_server.url}/messages", json=body)
    assert response.status_code == 200, response.text
    assert "MCP servers left out" in response.headers["x-retain-warning"]
