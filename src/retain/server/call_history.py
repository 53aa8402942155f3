"""Calls of earlier turns in the shapes that chat templates take: one a message, with ids of a length, or as content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
ID_LENGTH = 9  # of the ids that Mistral's templates take


def change_calls(messages: Sequence[Mapping[str, Any]], change: Callable[[Message], Message]) -> list[Message]:
    """Return messages of which those that have calls are changed."""
    return [change(dict(message)) if message.get("tool_calls") else dict(message) for message in messages]


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with at most one call, each before its results. Results of no call follow the last one."""
    split: list[Message] = []
    i = 0
    while i < len(messages):
        message = dict(messages[i])
        i += 1
        if not message.get("tool_calls"):
            split.append(message)
            continue
        first = i
        while i < len(messages) and messages[i]["role"] == "tool":
            i += 1
        split += _split(message, messages[first:i])
    return split


def _split(message: Message, results: Sequence[Mapping[str, Any]]) -> list[Message]:
    calls = message["tool_calls"]
    place: dict[Any, int] = {}
    for i, call in enumerate(calls):
        place.setdefault(call.get("id"), i)
    of_call: list[list[Message]] = [[] for _ in calls]
    for result in results:
        of_call[place.get(result.get("tool_call_id"), -1)].append(dict(result))
    bare = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
    split: list[Message] = []
    for i, call in enumerate(calls):
        head = {**bare, "content": ""} if i else message
        split += [{**head, "tool_calls": [call]}, *of_call[i]]
    return split


def shorten_ids(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages whose ids of calls all have nine letters and digits; equal ids stay equal."""
    shortened = change_calls(messages, _shorten_ids_of_calls)
    return [
        {**m, "tool_call_id": _shorten(m["tool_call_id"])} if m.get("tool_call_id") is not None else m
        for m in shortened
    ]


def _shorten_ids_of_calls(message: Message) -> Message:
    return {**message, "tool_calls": [{**call, "id": _shorten(call.get("id"))} for call in message["tool_calls"]]}


def _shorten(call_id: Any) -> str:
    text = str(call_id)
    is_short = len(text) == ID_LENGTH and text.isascii() and text.isalnum()
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:ID_LENGTH]


def write_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with the arguments of each call as JSON, for templates that join texts."""

    def change_message(message: Message) -> Message:
        functions = [call["function"] for call in message["tool_calls"]]
        changed = [{**function, "arguments": _to_text(function["arguments"])} for function in functions]
        pairs = zip(message["tool_calls"], changed, strict=True)
        return {**message, "tool_calls": [{**call, "function": function} for call, function in pairs]}

    return change_calls(messages, change_message)


def _to_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
