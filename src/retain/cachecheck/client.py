"""A client of the server under test: prompts go out as bodies of OpenAI's API, answers and errors come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from retain.cachecheck.answer import Answer, join_events, read_answer
from retain.cachecheck.texts import Prompt
from retain.http_client import HttpClient

MAX_EVENTS = 10_000  # of a stream


@dataclass(frozen=True)
class Transport:
    """What a client reaches a server through, and its clock; tests replace both."""

    http: httpx.BaseTransport | None = None
    clock: Callable[[], float] = time.perf_counter


class ServerClient:
    """Prompts to one server with one API key, timed. Threads may share it. Errors are ValueErrors of one line."""

    def __init__(self, url: str, key: str | None, timeout: float, transport: Transport):
        self._http = HttpClient(url, key, httpx.Timeout(timeout), transport.http)
        self._clock = transport.clock
        self.close = self._http.close
        self.first_model = self._http.first_model

    def ask(self, prompt: Prompt, fields: Mapping[str, Any]) -> Answer:
        """Return the greedy answer to a prompt; `fields` are further fields of the body. Raises ValueError."""
        path = prompt.endpoint.path
        body = {**prompt.endpoint.to_body(prompt.turns), "temperature": 0, **fields}
        start = self._clock()
        if body.get("stream"):
            response = join_events(self._http.stream(path, body, MAX_EVENTS))
        else:
            response = self._http.post(path, body)
        return read_answer(response, self._clock() - start)
