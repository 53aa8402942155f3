"""The conversion of conversations is linear in their items and in their text, whatever follows what."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest

from retain.server.anthropic import conversion as anthropic_conversion
from retain.server.anthropic.protocol import MessagesRequest
from retain.server.openai.messages import join_system_messages, to_template_messages
from retain.server.openai.responses import conversion
from retain.server.openai.responses.conversion import convert_request
from retain.server.openai.responses.history import ITEMS, Conversation, build_turn, encode_items, load_items
from retain.server.openai.responses.protocol import ResponsesRequest
from tests.helpers.counted_work import assert_linear

Json = dict[str, Any]
TEXT = "x" * 2000
ITEMS_BY_KIND: dict[str, Callable[[int], Json]] = {
    "user": lambda i: {"role": "user", "content": TEXT},
    "system": lambda i: {"role": "system", "content": TEXT},
    "assistant": lambda i: {"role": "assistant", "content": TEXT},
    "reasoning": lambda i: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": TEXT}]},
    "call": lambda i: {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
    "tools": lambda i: {"type": "additional_tools", "tools": [{"type": "function", "name": "g", "description": TEXT}]},
    "other": lambda i: {"type": "web_search_call", "id": f"w{i}", "query": TEXT},
}
BODY = ResponsesRequest.model_validate({"model": "m", "input": []})


def build_items(kinds: tuple[str, ...], num_items: int) -> list[Any]:
    return ITEMS.validate_python([ITEMS_BY_KIND[kinds[i % len(kinds)]](i) for i in range(num_items)])


@pytest.mark.parametrize("kinds", list(combinations_with_replacement(ITEMS_BY_KIND, 2)), ids="-".join)
def test_work_of_a_conversation_is_linear(kinds: tuple[str, str]) -> None:
    def prepare(num_items: int) -> Callable[[], object]:
        stored = encode_items(build_items(kinds, num_items))

        def convert() -> None:
            chat = convert_request(BODY, load_items(stored)).chat
            join_system_messages(to_template_messages(chat.messages))

        return convert

    assert_linear(prepare, 24)


@pytest.mark.slow
def test_work_of_many_calls_is_linear() -> None:
    """All of them are of one message."""

    def prepare(num_items: int) -> Callable[[], object]:
        calls = build_items(("call",), num_items)
        return lambda: to_template_messages(conversion.to_messages(calls))

    assert_linear(prepare, 500)


def test_work_of_a_conversation_of_many_turns_is_linear() -> None:
    def prepare(num_turns: int) -> Callable[[], object]:
        items = encode_items(build_items(("user",), 1))
        turn = None
        for _ in range(num_turns):
            turn = build_turn(items, [], b"{}", turn)
        return Conversation([], turn).load_history

    assert_linear(prepare, 100)


def test_work_of_references_is_linear() -> None:
    """Also where all are to items of one turn."""

    def prepare(num_items: int) -> Callable[[], object]:
        stored = {item.id: item for item in encode_items(build_items(("call",), num_items))}
        references = ITEMS.validate_python([{"type": "item_reference", "id": name} for name in stored])
        return Conversation(references, None, stored).load_input

    assert_linear(prepare, 60)


@pytest.mark.parametrize("place", ["messages", "blocks", "results", "system", "tools"])
def test_work_of_breakpoints_is_linear(place: str) -> None:
    """Of Anthropic's API. Only the last one is cut."""

    def prepare(num_breakpoints: int) -> Callable[[], object]:
        marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * num_breakpoints
        result = {"type": "tool_result", "tool_use_id": "t", "content": marked}
        contents: dict[str, list[Any]] = {"messages": [[block] for block in marked], "blocks": [marked]}
        body = {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": content} for content in contents.get(place, ["x"])],
        }
        if place == "results":
            body["messages"] = [{"role": "user", "content": [result]}]
        elif place == "system":
            body["system"] = marked
        elif place == "tools":
            tool = {"input_schema": {}, "cache_control": {"type": "ephemeral"}}
            body["tools"] = [{"name": f"t{i}", **tool} for i in range(num_breakpoints)]
        request = MessagesRequest.model_validate(body)
        return lambda: anthropic_conversion.cut_at_breakpoints(request)

    assert_linear(prepare, 200)
