"""The endpoints that answer a prompt: how a body of each says its turns, and asks for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from cachecheck.http_client import Json

ROLES = ("user", "assistant")
TOP_LOGPROBS = 5


class Endpoint(StrEnum):
    """An endpoint of OpenAI's API; its value is what it takes."""

    CHAT = "chat"
    TEXT = "text"

    @property
    def path(self) -> str:
        """The path of the endpoint below the server's base URL."""
        return {Endpoint.CHAT: "/chat/completions", Endpoint.TEXT: "/completions"}[self]

    @property
    def logprob_fields(self) -> Json:
        """The fields of a body that ask for log-probabilities."""
        chat: Json = {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return {Endpoint.CHAT: chat, Endpoint.TEXT: {"logprobs": TOP_LOGPROBS}}[self]

    def to_body(self, turns: Sequence[str], image: str = "") -> Json:
        """Return turns of user and assistant as fields of a body; a chat may begin with an image, a data URL."""
        if self is Endpoint.TEXT:
            return {"prompt": "".join(turns)}
        messages: list[Json] = [{"role": ROLES[i % 2], "content": turn} for i, turn in enumerate(turns)]
        if image:
            text = {"type": "text", "text": turns[0]}
            messages[0]["content"] = [{"type": "image_url", "image_url": {"url": image}}, text]
        return {"messages": messages}
