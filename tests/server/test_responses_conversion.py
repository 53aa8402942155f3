"""Items of the Responses API become the messages of a chat completion, stored or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import APIError
from retain.server.openai.responses.conversion import (
    convert_request,
    get_input_items,
    rename_parameter,
    to_messages,
)
from retain.server.openai.responses.history import ITEMS, Conversation, build_turn, encode_items, load_items
from retain.server.openai.responses.items import OTHER_ITEMS, dump_item, encode_reasoning
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


def custom_call(name: str, text: str) -> Json:
    fields = {"call_id": f"call_{name}", "name": name, "input": text, "status": "completed"}
    return {"type": "custom_tool_call", "namespace": "ns", **fields}


def other_call(kind: str, text: str) -> Json:
    fields: Json = {
        "local_shell_call": {"action": {"type": "exec", "command": [text], "env": {}, "timeout_ms": None}},
        "shell_call": {"action": {"commands": [text], "timeout_ms": 5}, "environment": {"type": "local"}},
        "apply_patch_call": {"operation": {"type": "create_file", "path": "a", "diff": text}},
        "tool_search_call": {"execution": "client", "arguments": {"query": text}},
        "web_search_call": {"action": {"type": "search", "query": text}, "status": "completed"},
        "compaction": {"encrypted_content": text},
    }
    return {"type": kind, "call_id": f"call_{kind}", **fields[kind]}


def added_tool(name: str) -> Json:
    tool = {"type": "custom", "name": name, "format": {"type": "text"}}
    return {"type": "additional_tools", "role": "developer", "tools": [tool, {"type": "web_search"}]}


TOOLS = [{"type": "function", "name": "f"}]
OTHER_CALLS = [
    "tool_search_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "web_search_call",
    "compaction",
]
ITEM = st.one_of(
    st.builds(message, st.sampled_from(["user", "assistant", "system", "developer"]), st.text(max_size=4)),
    st.builds(reasoning, st.text(max_size=4)),
    st.builds(call, st.sampled_from("fg")),
    st.builds(custom_call, st.sampled_from("fg"), st.text(max_size=4)),
    st.builds(other_call, st.sampled_from(OTHER_CALLS), st.text(max_size=4)),
    st.builds(added_tool, st.sampled_from("gh")),
)


def store(asked: list[Json], answered: list[Json]) -> StoredTurn:
    """Return a stored turn with these items; answers have ids as the server's have."""
    identified = [{"id": f"out_{i}", **item} for i, item in enumerate(answered)]
    output = [dump_item(item) for item in ITEMS.validate_python(identified)]
    return build_turn(encode_items(ITEMS.validate_python(asked)), output, b"{}", None)


@given(st.lists(ITEM, max_size=6), st.lists(ITEM, max_size=4), st.lists(ITEM, min_size=1, max_size=4))
def test_stored_turn_and_whole_history_are_the_same_messages(
    asked: list[Json], answered: list[Json], added: list[Json]
) -> None:
    first = store(asked, answered)
    body = ResponsesRequest(model="m", input=added, tools=TOOLS)
    conversation = Conversation(body.input, first)  # type: ignore[arg-type]
    continued = convert_request(body, [*conversation.load_history(), *conversation.load_input()])
    body = ResponsesRequest(model="m", input=[*asked, *answered, *added], tools=TOOLS)
    whole = convert_request(body, body.input)  # type: ignore[arg-type]
    assert continued.chat == whole.chat and continued.warnings == whole.warnings
    assert len(list(first.iter_items())) == len(asked) + len(answered)


@pytest.mark.parametrize(
    ("called", "output", "text"),
    [
        (call("f"), {"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}]}, "x"),
        (custom_call("f", "+a"), {"type": "custom_tool_call_output", "output": "x", "name": "f"}, "x"),
        (other_call("local_shell_call", "ls"), {"type": "function_call_output", "output": "x"}, "x"),
        (other_call("local_shell_call", "ls"), {"type": "local_shell_call_output", "output": "x"}, "x"),
        (
            other_call("shell_call", "ls"),
            {
                "type": "shell_call_output",
                "max_output_length": 9,
                "output": [{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
            },
            '[{"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}]',
        ),
        (other_call("apply_patch_call", "+a"), {"type": "apply_patch_call_output", "status": "failed"}, "failed"),
        (other_call("apply_patch_call", "+a"), {"type": "apply_patch_call_output", "output": "x"}, "x"),
    ],
)
def test_outputs_of_every_kind_of_call(called: Json, output: Json, text: str) -> None:
    asked, answered = convert([called, {**output, "call_id": called["call_id"]}])
    assert answered == {"role": "tool", "tool_call_id": called["call_id"], "content": text}
    assert len(asked["tool_calls"]) == 1
    with pytest.raises(APIError, match="call_id"):
        convert([{**output, "call_id": called["call_id"]}])


def test_output_of_a_shell_names_the_call_by_its_id() -> None:
    called = {**other_call("local_shell_call", "ls"), "id": "lsh_1"}
    converted = convert([called, {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"}])
    assert converted[1]["tool_call_id"] == called["call_id"]


def test_items_of_other_servers() -> None:
    """Their marks change nothing; what cannot be read is left out."""
    plain = [message("user", "x"), message("assistant", "no"), call("f"), result("f")]
    marks = {"id": "i" * 500, "status": "done", "phase": "commentary", "created_by": "y", "unknown": None}
    marked: list[Json] = [{**item, **marks} for item in plain]
    marked[1]["content"] = [{"type": "refusal", "refusal": "no"}]
    marked[1:1] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
    ]
    assert convert(marked) == convert(plain)
    body = ResponsesRequest(model="m", input=marked)
    assert convert_request(body, ITEMS.validate_python(marked)).warnings == ["items left out: web_search_call"]


@given(st.text(min_size=1))
def test_reasoning_comes_back_in_either_field(text: str) -> None:
    """Some clients keep the text of an item, others only its `encrypted_content`."""
    encrypted = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": encode_reasoning(text)}
    assert convert([encrypted]) == convert([reasoning(text)])


@pytest.mark.parametrize("encoded", ["", "retain:", "retain:x", "retain:/w==", "gAAAA"])
def test_reasoning_that_cannot_be_read_is_ignored(encoded: str) -> None:
    assert convert([{"type": "reasoning", "summary": [], "encrypted_content": encoded}]) == []


def to_chat(**fields: Any) -> ChatCompletionRequest:
    body = ResponsesRequest(**{"model": "m", "input": "x", **fields})
    return convert_request(body, get_input_items(body)).chat


@pytest.mark.parametrize("nothing", ["", []])
def test_an_empty_input_is_an_empty_message(nothing: Any) -> None:
    messages = to_chat(input=nothing, instructions="Be brief.").messages
    assert [(m.role, m.content) for m in messages] == [("system", "Be brief."), ("user", "")]
    body = ResponsesRequest(model="m", input=nothing)
    stored = store([message("user", "a")], [message("assistant", "b")])
    assert len(convert_request(body, load_items(stored.items)).chat.messages) == 2, (
        "a stored conversation is answered as it is"
    )


def test_a_prompt_that_is_only_computed() -> None:
    assert to_chat(max_output_tokens=9).max_completion_tokens == 9
    for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True, "ttl": "30m"}}):
        assert to_chat(max_output_tokens=9, **fields).max_completion_tokens == 1


def test_effort_decides_whether_the_model_reasons() -> None:
    def thinks(**fields: Any) -> bool | None:
        return to_chat(**fields).template_variables.get("enable_thinking")

    assert thinks() is None and thinks(reasoning={"effort": None, "summary": "auto"}) is None
    assert thinks(reasoning={"effort": "none"}) is False
    assert thinks(reasoning={"effort": "xhigh", "summary": "auto"}) is True


def test_references_become_the_items_of_stored_turns() -> None:
    turn = store([{**message("user", "a"), "id": "msg_1"}], [message("assistant", "b"), call("f")])
    items = ITEMS.validate_python([{"type": "item_reference", "id": "msg_1"}, {"id": "out_1"}, message("user", "c")])
    resolved = Conversation(items, None, {item.id: item for item in turn.items}).load_input()
    assert [item.type for item in resolved] == ["message", "function_call", "message"]
    assert len(to_messages(resolved)) == 3


def test_stored_items_keep_their_ids() -> None:
    items = ITEMS.validate_python([{**message("user", "x"), "id": "msg_1"}, message("user", "y")])
    ids = [item.id for item in encode_items(items)]
    assert ids[0] == "msg_1" and ids[1].startswith("msg_")


def test_fields_of_chat_completions_are_renamed_in_errors() -> None:
    error = rename_parameter(APIError(400, "max_tokens is 9: at most 8", "max_tokens"))
    assert (error.param, error.message) == ("max_output_tokens", "max_output_tokens is 9: at most 8")
    other = APIError(400, "x", "tools")
    assert rename_parameter(other) is other


@pytest.mark.parametrize("kind", OTHER_ITEMS)
def test_of_an_item_that_is_left_out_only_what_names_it_is_stored(kind: str) -> None:
    item = {"type": kind, "content": "x", "any": [1]}
    (validated,) = ITEMS.validate_python([{**item, "id": "i"}])
    assert dump_item(validated) == {"id": "i", "status": "completed", "type": kind}
    with pytest.raises(ValidationError):
        ITEMS.validate_python([{**item, "id": ["no", "text"]}])
