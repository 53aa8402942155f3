"""A client of the server under test: prompts go out as bodies of OpenAI's API, answers and errors come back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from retain.cachecheck.answer import Answer, Json, join_events, read_answer
from retain.cachecheck.texts import Prompt

MAX_EVENTS = 10_000  # of a stream
TOP_LOGPROBS = 5


class RefusedError(ValueError):
    """The server answered a request with an error."""


@dataclass(frozen=True)
class Transport:
    """What a client reaches a server through, and its clock; tests replace both."""

    http: httpx.BaseTransport | None = None
    clock: Callable[[], float] = time.perf_counter


class ServerClient:
    """Requests to one server with one API key. Threads may share it. Errors are ValueErrors of one line."""

    def __init__(self, url: str, key: str | None, timeout: float, transport: Transport):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
        self.url = url.rstrip("/")
        self._clock = transport.clock
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport.http)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ValueError."""
        try:
            return str(self._read_json(self._send("GET", "/models"))["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError(f"{self.url} lists no model: name one by --model") from None

    def ask(self, prompt: Prompt, fields: Mapping[str, Any]) -> Answer:
        """Return the greedy answer to a prompt; `fields` are further fields of the body. Raises ValueError."""
        path = "/chat/completions" if prompt.is_chat else "/completions"
        body = {**prompt.to_body(), "temperature": 0, **fields}
        start = self._clock()
        if body.get("stream"):
            response = join_events(self._stream(path, body))
        else:
            response = self._read_json(self._send("POST", path, body))
        return read_answer(response, self._clock() - start)

    def _send(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self.url}: {error or type(error).__name__}") from None
        self._check_status(response)
        return response

    def _stream(self, path: str, body: Json) -> Iterator[Json]:
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                self._check_status(response)
                for i, line in enumerate(response.iter_lines()):
                    if i > MAX_EVENTS:
                        raise ValueError(f"{self.url}: a stream has more than {MAX_EVENTS} lines")
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield self._parse(line[5:])
        except httpx.HTTPError as error:
            raise ValueError(f"{self.url}: {error or type(error).__name__}") from None

    def _check_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            message = str(json.loads(response.content)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = response.reason_phrase
        raise RefusedError(f"{self.url}: {response.status_code} {message[:500]}")

    def _read_json(self, response: httpx.Response) -> Json:
        return self._parse(response.content)

    def _parse(self, data: bytes | str) -> Json:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{self.url}: the answer is no JSON object")
        return value


def logprob_fields(is_chat: bool) -> Json:
    """Return the fields of a body that ask for log-probabilities."""
    return {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if is_chat else {"logprobs": TOP_LOGPROBS}
