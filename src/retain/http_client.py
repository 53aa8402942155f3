"""A client of an OpenAI-compatible server: JSON goes out, and answers come back as events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

Json = dict[str, Any]

MAX_BODY_BYTES = 64 * 2**20  # of an answer
MAX_EVENT_CHARS = 16 * 2**20


class HttpClient:
    """Requests to the server at `url`, such as http://127.0.0.1:8000/v1. Errors are ValueErrors that name it.

    Threads may share it.
    """

    def __init__(
        self, url: str, api_key: str | None, timeout: httpx.Timeout, transport: httpx.BaseTransport | None = None
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport, follow_redirects=True)

    def close(self) -> None:
        """Close the connections to the server."""
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ValueError."""
        with self._open("GET", "/models") as response:
            models = self._parse(self._read_body(response))
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError(f"{self.url} lists no model: name one by --model") from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Json]:
        """Yield the events of an answer as they come. Raises ValueError, also for the event of an error."""
        with self._open("POST", path, body) as response:
            for line in self._lines(response):
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    event = self._parse(line[5:])
                    if event.get("error"):
                        raise ValueError(f"{self.url}: {_error_message(event) or 'the answer ended by an error'}")
                    yield event

    @contextmanager
    def _open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, self.url + path, json=body) as response:
                if not response.is_success:
                    raise ValueError(f"{self.url}: {self._describe_error(response)}")
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self.url}: {error or type(error).__name__}") from None

    def _lines(self, response: httpx.Response) -> Iterator[str]:
        """Yield lines as server-sent events have them: texts may hold what Python and httpx call an end of a line."""
        rest = ""
        for text in response.iter_text():
            *lines, rest = (rest + text).split("\n")
            if len(rest) > MAX_EVENT_CHARS:
                raise ValueError(f"{self.url}: an event of a stream is longer than {MAX_EVENT_CHARS} characters")
            yield from lines
        yield rest

    def _read_body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        for part in response.iter_bytes():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ValueError(f"{self.url}: an answer is larger than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    def _describe_error(self, response: httpx.Response) -> str:
        try:
            message = _error_message(json.loads(self._read_body(response)))
        except (ValueError, RecursionError):
            message = None
        return f"{response.status_code} {message or response.reason_phrase}".rstrip()

    def _parse(self, data: bytes | str) -> Json:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{self.url}: the answer is no JSON object")
        return value


def _error_message(body: Any) -> str | None:
    """Return the message of an error in the form of OpenAI's API, None where it has another form."""
    try:
        return str(body["error"]["message"])
    except (LookupError, TypeError):
        return None
