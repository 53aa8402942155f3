"""Items of the Responses API become the messages of a chat completion, stored or not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.server.openai.errors import APIError
from retain.server.openai.responses.conversion import (
    ITEMS,
    dump_items,
    iter_stored_items,
    rename_parameter,
    to_chat_request,
    to_messages,
)
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.responses.store import StoredTurn

Json = dict[str, Any]


def reasoning(text: str) -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(name: str) -> Json:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}"}


def result(name: str) -> Json:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": f"result of {name}"}


def message(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def convert(items: list[Json]) -> list[Json]:
    """Convert items, and show messages in short: role, content, calls, reasoning."""
    short = []
    for m in to_messages(ITEMS.validate_python(items)):
        fields = m.model_dump(exclude_none=True, exclude_unset=True)
        if "tool_calls" in fields:
            fields["tool_calls"] = [c["function"]["name"] for c in fields["tool_calls"]]
        short.append(fields)
    return short


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (
            [reasoning("why"), message("assistant", "so"), call("f"), call("g"), result("f"), result("g")],
            [
                {"role": "assistant", "reasoning_content": "why", "content": "so", "tool_calls": ["f", "g"]},
                {"role": "tool", "tool_call_id": "call_f", "content": "result of f"},
                {"role": "tool", "tool_call_id": "call_g", "content": "result of g"},
            ],
        ),
        (
            [message("assistant", "a"), call("f"), message("assistant", "b"), result("f"), message("assistant", "c")],
            [
                {"role": "assistant", "content": "ab", "tool_calls": ["f"]},
                {"role": "tool", "tool_call_id": "call_f", "content": "result of f"},
                {"role": "assistant", "content": "c"},
            ],
        ),
        (
            [message("assistant", "a"), message("assistant", "b"), reasoning("x"), reasoning("y"), message("user", "")],
            [
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "assistant", "reasoning_content": "xy"},
                {"role": "user", "content": ""},
            ],
        ),
    ],
)
def test_one_assistant_turn_is_one_message(items: list[Json], expected: list[Json]) -> None:
    converted = convert(items)
    for fields in converted:
        if fields.get("reasoning_content") is None:
            fields.pop("reasoning_content", None)
    assert converted == expected


def test_result_without_its_call_is_refused() -> None:
    with pytest.raises(APIError, match="call_id"):
        convert([call("f"), result("g")])


ITEM = st.one_of(
    st.builds(message, st.sampled_from(["user", "assistant", "system", "developer"]), st.text(max_size=4)),
    st.builds(reasoning, st.text(max_size=4)),
    st.builds(call, st.sampled_from("fg")),
)


@given(st.lists(ITEM, max_size=6), st.lists(ITEM, max_size=4), st.lists(ITEM, min_size=1, max_size=4))
def test_stored_turn_and_whole_history_are_the_same_messages(
    asked: list[Json], answered: list[Json], added: list[Json]
) -> None:
    first = StoredTurn(orjson.dumps({"output": answered}), dump_items(ITEMS.validate_python(asked)))
    continued = to_chat_request(ResponsesRequest(model="m", input=added), first)
    whole = to_chat_request(ResponsesRequest(model="m", input=[*asked, *answered, *added]), None)
    assert continued.messages == whole.messages
    stored = list(iter_stored_items(first, with_output=True))
    assert len(stored) == len(asked) + len(answered) and all("id" in item for item in stored[: len(asked)])


def test_stored_items_keep_their_ids() -> None:
    items = ITEMS.validate_python([{**message("user", "x"), "id": "msg_1"}, message("user", "y")])
    ids = [item["id"] for item in orjson.loads(dump_items(items))]
    assert ids[0] == "msg_1" and ids[1].startswith("msg_")


def test_fields_of_chat_completions_are_renamed_in_errors() -> None:
    error = rename_parameter(APIError(400, "max_tokens is 9: at most 8", "max_tokens"))
    assert (error.param, error.message) == ("max_output_tokens", "max_output_tokens is 9: at most 8")
    other = APIError(400, "x", "tools")
    assert rename_parameter(other) is other
