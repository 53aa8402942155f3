"""A conversation with a server, as `retain chat --url` has it. Any OpenAI-compatible one will do.

What is not known here: terminals, engines.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any


class Client:
    """Of the server at `url`, such as http://127.0.0.1:8000/v1; the key is $OPENAI_API_KEY, where there is one."""

    def __init__(self, url: str, model: str | None = None):
        """Without a name the first model that is served. Raises ValueError where nothing answers."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address: it begins with http:// or https://")
        self.url = url.rstrip("/")
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._send_request("/models", None) as said:
            try:
                return str(json.load(said)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{self.url} tells of no model: name one by --model") from None

    def stream(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> Iterator[str]:
        """The answer to a conversation, piece by piece. Raises ValueError for what the server refuses."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **options}
        with self._send_request("/chat/completions", body) as said:
            for line in said:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"{self.url}: {_error_message(event)}")
                for choice in event.get("choices", ()):
                    yield choice["delta"].get("content") or ""

    def _send_request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | _auth_headers()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            try:
                said = _error_message(json.load(error))
            except (ValueError, LookupError, TypeError):
                said = error.reason
            raise ValueError(f"{self.url}: {said}") from None
        except (urllib.error.URLError, HTTPException, OSError) as error:
            raise ValueError(f"{self.url}: {getattr(error, 'reason', error)}") from None


def _error_message(body: Mapping[str, Any]) -> str:
    return str(body["error"]["message"])


def _auth_headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
