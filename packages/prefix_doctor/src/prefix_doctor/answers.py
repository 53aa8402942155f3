"""Answers of a server to requests with `explain_prefix`: what they say of the prefix cache."""

from __future__ import annotations

from typing import Any

NUMBERS = ("cached_tokens", "computed_tokens", "common_tokens", "known_tokens")
TEXTS = ("cause", "detail", "before", "prompt_text", "nearest_text")


def find_prefixes(body: Any) -> list[dict[str, Any]]:
    """Return the object `retain.prefix` of each choice of an answer; nothing where the body is another one.

    Raises ValueError where such an object lacks something.
    """
    if not isinstance(body, dict) or "retain" not in body:
        return []
    found = body["retain"] if isinstance(body["retain"], list) else [body["retain"]]
    prefixes = [choice["prefix"] for choice in found if isinstance(choice, dict) and "prefix" in choice]
    if not prefixes:
        raise ValueError('the answer does not say it: send the request with "explain_prefix": true')
    for prefix in prefixes:
        _check(prefix)
    return prefixes


def _check(prefix: Any) -> None:
    if not isinstance(prefix, dict):
        raise ValueError("retain.prefix is not an object")
    for names, kind in ((NUMBERS, int), (TEXTS, str)):
        if wrong := [name for name in names if not isinstance(prefix.get(name), kind)]:
            raise ValueError(f"retain.prefix has no {wrong[0]}")
    if not isinstance(prefix.get("age_s"), int | float | None):
        raise ValueError("retain.prefix has no age_s")
