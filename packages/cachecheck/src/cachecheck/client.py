"""A client of the server under test: prompts go out as bodies of OpenAI's API, answers and errors come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cachecheck.answer import Answer, join_events, read_answer
from cachecheck.http_client import HttpClient, RefusedError
from cachecheck.texts import Prompt


@dataclass(frozen=True)
class Transport:
    """What a client reaches a server through, and its clock; tests replace both."""

    http: httpx.BaseTransport | None = None
    clock: Callable[[], float] = time.perf_counter


class ServerClient:
    """Prompts to one server with one API key, timed. Threads may share it. Errors are ValueErrors of one line."""

    def __init__(self, url: str, key: str | None, timeout: float, transport: Transport):
        self._http = HttpClient(url, key, timeout, transport.http)
        self._clock = transport.clock
        self.close = self._http.close

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ValueError."""
        models = self._http.request("GET", "/models")
        try:
            return str(models["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError(f"{self._http.url} lists no model: name one by --model") from None

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a body to a path of the API, whatever it answers. Raises RefusedError, ValueError."""
        self._http.send("POST", self._http.url + path, dict(body))

    def read_metrics(self) -> str:
        """Return the metrics beside the API, in Prometheus' text format. Raises RefusedError, ValueError."""
        return self._http.send("GET", f"{self._http.url.removesuffix('/v1')}/metrics").decode(errors="replace")

    def ask(self, prompt: Prompt, fields: Mapping[str, Any]) -> Answer:
        """Return the greedy answer to a prompt; `fields` are further fields of the body. Raises ValueError."""
        path = prompt.endpoint.path
        body = {**prompt.endpoint.to_body(prompt.turns, prompt.image), "temperature": 0, **fields}
        start = self._clock()
        if body.get("stream"):
            response = join_events(self._http.stream(path, body))
        else:
            response = self._http.request("POST", path, body)
        return read_answer(response, self._clock() - start)


def find_api(url: str, key: str | None, timeout: float, transport: Transport) -> str:
    """Return the address of the API: `/v1` of an address without a path, where that lists models. Raises ValueError."""
    if "/" in url.partition("://")[2].rstrip("/"):
        return url
    api = f"{url.rstrip('/')}/v1"
    client = ServerClient(api, key, timeout, transport)
    try:
        client.first_model()
    except RefusedError:
        return url
    finally:
        client.close()
    return api
