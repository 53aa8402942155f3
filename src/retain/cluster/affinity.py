"""What a request begins with, as a key: requests with equal keys should meet on the replica that has their prefix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

TOKENS_PER_CHAR = 0.25  # about, to cut prompts of token ids


def prefix_key(body: bytes, num_chars: int) -> str | None:
    """Return the key of the text in a request's body, or None where there is no text.

    A conversation is known by its messages up to the first of its user, so all of its turns have one key. Equal texts
    of two values of `cache_salt` share no pages and so no key.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    text = "\0".join(_beginning(fields, num_chars))[:num_chars]
    return hash_key(str(fields.get("cache_salt") or ""), text) if text else None


def hash_key(*parts: str) -> str:
    """Return a digest of texts that shows none of them."""
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _beginning(fields: dict[str, Any], num_chars: int) -> Iterator[str]:
    """Yield the texts that a prompt begins with: a prompt itself, or the first messages of a conversation."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list) and prompt:
        # Several prompts are one request; the first one chooses its replica.
        first = prompt[0]
        ids = first if isinstance(first, list) else prompt
        yield first if isinstance(first, str) else " ".join(map(str, ids[: int(num_chars * TOKENS_PER_CHAR)]))
    for name in ("instructions", "system"):
        yield from _texts(fields.get(name))
    messages = fields.get("messages") or fields.get("input")
    if isinstance(messages, str):
        yield messages
    elif isinstance(messages, list):
        yield from _first_messages(messages)


def _first_messages(messages: Iterable[Any]) -> Iterator[str]:
    for message in messages:
        if isinstance(message, dict):
            yield str(message.get("role"))
            yield from _texts(message.get("content"))
            if message.get("role") == "user":
                return


def _texts(content: Any) -> Iterator[str]:
    """Yield the texts of a content: a text, or parts that may have one."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
