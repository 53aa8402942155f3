"""HTTP to the server under test: JSON goes out and comes back, whole or as events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

Json = dict[str, Any]

MAX_EVENTS = 10_000  # of a stream
MAX_BYTES = 64 * 2**20  # of an answer, and of an event
# Of a request that the server does not take; others say that it is busy, broken, or wants another key.
REFUSALS = (400, 404, 405, 413, 415, 422, 501)


class RefusedError(ValueError):
    """The server does not take a request: with one of the statuses `REFUSALS`."""


class HttpClient:
    """Requests to the API at `url`, with one key. Errors are ValueErrors that name it. Threads may share it."""

    def __init__(self, url: str, key: str | None, timeout: float, transport: httpx.BaseTransport | None):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport, follow_redirects=True)
        self.close = self._http.close

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """Return the answer to a request. Raises ValueError."""
        return self._parse(self.send(method, self.url + path, body))

    def send(self, method: str, address: str, body: Json | None = None) -> bytes:
        """Return the answer to a request to any address, as it came. Raises ValueError."""
        with self._open(method, address, body) as response:
            return self._read(response)

    def stream(self, path: str, body: Json) -> Iterator[Json]:
        """Yield the events of an answer as they come. Raises ValueError, also for the event of an error."""
        with self._open("POST", self.url + path, body) as response:
            data = (line[5:].strip() for line in self._lines(response) if line.startswith(b"data:"))
            for number, text in enumerate(text for text in data if text != b"[DONE]"):
                if number == MAX_EVENTS:
                    raise ValueError(f"{self.url}: a stream has more than {MAX_EVENTS} events")
                event = self._parse(text)
                if event.get("error"):
                    raise ValueError(f"{self.url}: {_error_message(event) or 'the answer ended by an error'}")
                yield event

    @contextmanager
    def _open(self, method: str, address: str, body: Json | None) -> Iterator[httpx.Response]:
        try:
            with closing(self._send(method, address, body)) as response:
                if not response.is_success:
                    kind = RefusedError if response.status_code in REFUSALS else ValueError
                    raise kind(f"{self.url}: {self._describe_error(response)}")
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self.url}: {error or type(error).__name__}") from None

    def _send(self, method: str, address: str, body: Json | None) -> httpx.Response:
        """Send a request, again where the server had closed the connection that was kept: it has read nothing."""
        request = self._http.build_request(method, address, json=body)
        try:
            return self._http.send(request, stream=True)
        except httpx.RemoteProtocolError:
            return self._http.send(request, stream=True)

    def _lines(self, response: httpx.Response) -> Iterator[bytes]:
        """Yield lines as server-sent events have them: texts may hold what Python calls an end of a line."""
        rest = b""
        for part in response.iter_bytes():
            *lines, rest = (rest + part).split(b"\n")
            self._check_size(rest)
            yield from lines
        yield rest

    def _read(self, response: httpx.Response) -> bytes:
        body = bytearray()
        for part in response.iter_bytes():
            body += part
            self._check_size(body)
        return bytes(body)

    def _check_size(self, data: bytes | bytearray) -> None:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{self.url}: an answer is larger than {MAX_BYTES} bytes")

    def _describe_error(self, response: httpx.Response) -> str:
        try:
            message = _error_message(self._parse(self._read(response)))
        except ValueError:
            message = None
        return f"{response.status_code} {message or response.reason_phrase}".rstrip()

    def _parse(self, data: bytes) -> Json:
        try:
            value = json.loads(data.decode(errors="replace"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{self.url}: the answer is no JSON object")
        return value


def _error_message(body: Json) -> str | None:
    """Return the message of an error in the form of OpenAI's API, None where it has another form."""
    try:
        return str(body["error"]["message"])
    except (LookupError, TypeError):
        return None
