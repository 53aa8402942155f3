"""The client of `retain chat --url`: texts arrive as they are, and what is wrong is said in one line."""

from __future__ import annotations

import json

import httpx
import pytest

from retain import http_client
from retain.http_client import HttpClient


def client_of(response: httpx.Response) -> HttpClient:
    """Return a client of a server that has one answer."""
    return HttpClient("http://fake/v1/", None, httpx.Timeout(1), httpx.MockTransport(lambda request: response))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('{"error": {"message": "out of memory"}}', "http://fake/v1: out of memory"),
        ('{"error": 7}', "ended by an error"),
        ("[1]", "no JSON object"),
        ("[" * 10_000, "no JSON object"),
        ("x" * 2000, "longer than 1000 characters"),
    ],
)
def test_what_is_wrong_in_a_stream_is_said_in_one_line(
    event: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_EVENT_CHARS", 1000 if event[0] == "x" else 10**6)
    with pytest.raises(ValueError, match=message) as error:
        list(client_of(httpx.Response(200, text=f"data: {event}")).stream("/completions", {}))
    assert "\n" not in str(error.value)


def test_texts_may_hold_what_python_calls_an_end_of_a_line() -> None:
    event = {"choices": [{"text": "a\u2028b\x85c"}]}
    text = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\ndata: [DONE]"
    assert list(client_of(httpx.Response(200, text=text)).stream("/completions", {})) == [event]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(401, json={"error": {"message": "no such key"}}), "http://fake/v1: 401 no such key"),
        (httpx.Response(500, text="[" * 10_000), "500 Internal Server Error"),
        (httpx.Response(200, text="<html>"), "no JSON object"),
        (httpx.Response(200, json={"data": []}), "lists no model"),
        (httpx.Response(200, text="x" * 2000), "larger than 1000 bytes"),
    ],
)
def test_what_is_wrong_with_a_list_of_models_is_said_in_one_line(
    response: httpx.Response, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 1000 if response.text[0] == "x" else 10**6)
    with pytest.raises(ValueError, match=message) as error:
        client_of(response).first_model()
    assert "\n" not in str(error.value)
