"""A client of an OpenAI-compatible server, as `retain chat --url` needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 30.0


class Client:
    """A client of the server at `url`, such as http://127.0.0.1:8000/v1. Errors are ValueErrors of one line."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None):
        """Connect; without a model's name the first served model is used. Raises ValueError where nothing answers."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # an answer may take as long as it takes
        self._http = httpx.Client(headers=headers, timeout=timeout, follow_redirects=True)
        self.model = model or self._first_model()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def stream(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> Iterator[str]:
        """Stream the answer to a conversation, piece by piece. Raises ValueError with the server's message."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **options}
        with self._open("POST", "/chat/completions", body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line.strip() == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"{self.url}: {_error_message(event)}")
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""

    def _first_model(self) -> str:
        with self._open("GET", "/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{self.url} lists no model: name one by --model") from None

    @contextmanager
    def _open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, self.url + path, json=body) as response:
                if response.is_error:
                    raise ValueError(f"{self.url}: {_read_error(response)}")
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self.url}: {error or type(error).__name__}") from None


def _read_error(response: httpx.Response) -> str:
    try:
        return _error_message(json.loads(response.read()))
    except (ValueError, LookupError, TypeError):
        return response.reason_phrase or str(response.status_code)


def _error_message(body: Mapping[str, Any]) -> str:
    return str(body["error"]["message"])
