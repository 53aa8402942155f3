"""JSON at its bounds, by clients and by models: what is accepted can be rendered, stored, sent back and continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from retain.server.anthropic.content_blocks import ContentBlocks
from retain.server.exact_json import parse_json, write_json
from retain.server.launch import GracefulServer
from retain.server.openai.body import MAX_DEPTH
from retain.server.openai.chat_protocol import FunctionDefinition
from retain.server.openai.responses.client_tools import ClientTool
from retain.server.openai.responses.history import ITEMS, encode_items, load_items
from retain.server.tool_format import ChatOutput, ParsedToolCall
from tests.server.conftest import HTTP, chat_template_replaced
from tests.server.test_tool_calls import HERMES

Json = dict[str, Any]

# ---- bodies as deep as they may be -----------------------------------------------------------------------------------


def deep(depth: int) -> Any:
    """Return objects and lists in each other."""
    value: Any = "x"
    for i in range(depth):
        value = {"a": value} if i % 2 else [value]
    return value


def deep_object(depth: int) -> Json:
    return {"a": deep(depth - 1)}


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


MESSAGE = {"role": "user", "content": "x"}


def items_of(depth: int) -> dict[str, Json]:
    """Return items of the Responses API, each with JSON of the client down to this depth."""
    call = {"call_id": "c"}
    return {
        "summary": {"type": "reasoning", "summary": [deep(depth - 2)]},
        "other": {"type": "compaction", "any": deep(depth - 1)},
        "search": {"type": "tool_search_call", "execution": "client", **call, "arguments": deep_object(depth - 1)},
        "shell": {"type": "shell_call", **call, "action": {"commands": ["x"]}, "environment": deep_object(depth - 1)},
        "tools": {"type": "additional_tools", "tools": [response_tool(depth - 2)]},
        "hosted": {"type": "additional_tools", "tools": [{"type": "web_search", "any": deep(depth - 3)}]},
        "metadata": {**MESSAGE, "metadata": deep(depth - 1)},
        "annotations": {**MESSAGE, "content": [{"type": "input_text", "text": "x", "annotations": deep(depth - 3)}]},
    }


def response_tool(depth: int) -> Json:
    return {"type": "function", "name": "f", "parameters": deep_object(depth - 1)}


def bodies_of(depth: int) -> Iterator[tuple[str, str, Json]]:
    """Yield an endpoint, a place where a client's JSON goes and a body with JSON there, down to this depth."""
    for place, item in items_of(depth - 2).items():
        yield "responses", f"input {place}", {"input": [item, MESSAGE]}
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, deep_object(depth - 3)],
    }
    schema = deep_object(depth - 3)
    for place, body in {
        "tools": {"tools": [response_tool(depth - 2)]},
        "search": {"tools": [{"type": "tool_search", "execution": "client", "parameters": deep_object(depth - 3)}]},
        "schema": {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
        "choice": {"tools": [response_tool(3)], "tool_choice": choice},
        "metadata": {"metadata": deep_object(depth - 1)},
    }.items():
        yield "responses", place, {"input": "x", **body}
    function = {"name": "f", "parameters": deep_object(depth - 4)}
    for place, body in {
        "tools": {"tools": [{"type": "function", "function": function}]},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        "variables": {"chat_template_kwargs": {"x": deep(depth - 2)}},
        "metadata": {"metadata": deep(depth - 1)},
    }.items():
        yield "chat/completions", place, {"messages": [MESSAGE], **body}
    yield "completions", "metadata", {"prompt": "x", "metadata": deep(depth - 1)}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": deep_object(depth - 5)}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}
    found = {"role": "user", "content": [{"type": "mcp_tool_result", "content": deep(depth - 5)}]}
    for place, body in {
        "input": {"messages": [MESSAGE, {"role": "assistant", "content": [use]}, result]},
        "result": {"messages": [found]},
        "tools": {"tools": [{"name": "f", "input_schema": deep_object(depth - 3)}]},
        "hosted": {"tools": [{"type": "web_search_20250305", "name": "f", "any": deep(depth - 3)}]},
        "schema": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "metadata": {"metadata": deep(depth - 1)},
    }.items():
        yield "messages", place, {"messages": [MESSAGE], **body}


@pytest.fixture(scope="module")
def tools_server(tiny_server: GracefulServer) -> Iterator[GracefulServer]:
    """A server whose chat template shows tools and calls."""
    with chat_template_replaced(tiny_server, HERMES):
        yield tiny_server


LENGTHS = {"responses": "max_output_tokens"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [pytest.param(path, body, id=f"{path} {place}") for path, place, body in bodies_of(MAX_DEPTH)],
)
def test_a_body_of_the_largest_depth_is_never_a_failure(path: str, body: Json, tools_server: GracefulServer) -> None:
    """Whole, streamed, rendered, stored, read back, listed, continued and referenced."""
    assert depth_of(body) == MAX_DEPTH
    body = {"model": "smollm2", LENGTHS.get(path, "max_tokens"): 1, **body}

    def post(body: Json, path: str = path) -> Any:
        response = HTTP.post(f"{tools_server.url}/{path}", json=body)
        assert response.status_code < 500 and "server_error" not in response.text, response.text
        return response

    whole = post(body)
    assert whole.status_code == 200 or "schema" in whole.text or "metadata" in whole.text, whole.text
    post({**body, "stream": True})
    post(body, f"{path}/{'count_tokens' if path == 'messages' else 'render'}")
    if path == "responses" and whole.status_code == 200:
        response_id = whole.json()["id"]
        root = f"{tools_server.url}/responses/{response_id}"
        assert HTTP.get(root).json() == whole.json()
        items = HTTP.get(f"{root}/input_items").json()["data"]
        following = post({**body, "input": "y", "previous_response_id": response_id})
        references = [{"type": "item_reference", "id": item["id"]} for item in items]
        again = post({**body, "input": [*references[::-1], MESSAGE]})
        for response in (following, again):
            listed = HTTP.get(f"{tools_server.url}/responses/{response.json()['id']}/input_items").json()["data"]
            assert [item for item in listed if item in items] == items


def test_one_more_is_refused(tools_server: GracefulServer) -> None:
    for path, _, body in bodies_of(MAX_DEPTH + 1):
        response = HTTP.post(f"{tools_server.url}/{path}", json={"model": "smollm2", **body})
        assert response.status_code == 400 and "nested" in response.text


# ---- numbers and texts that one JSON library reads and another does not write ----------------------------------------

NUMBERS = ("1e30", "-1e30", "1e300", str(2**63 - 1), str(2**63), str(2**64), str(10**30), "1.5", "-0.0", "3.0")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_item_with_any_number_is_refused_or_stored(number: str) -> None:
    value = parse_json(number.encode())
    exit_ = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": value}}
    for item in (
        {"type": "shell_call", "call_id": "c", "action": {"commands": [], "timeout_ms": value}},
        {"type": "shell_call", "call_id": "c", "action": {"commands": [], "max_output_length": value}},
        {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": [], "timeout_ms": value}},
        {"type": "shell_call_output", "call_id": "c", "output": [exit_]},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"a": [value]}},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": {"a": value}}]},
    ):
        try:
            items = ITEMS.validate_python([item])
        except ValidationError:
            continue
        (loaded,) = load_items(encode_items(items))
        assert loaded.model_copy(update={"id": None, "status": None}) == items[0]


WRITTEN = [
    *(f'{{"input": {number}, "timeout_ms": {number}}}' for number in (*NUMBERS, "NaN", "-Infinity")),
    r'{"input": "\ud800", "query": "\ud800"}',
    *(json.dumps(deep_object(depth)) for depth in (MAX_DEPTH, 250, 300, 900)),
    '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    "[1]",
    "text",
]


@pytest.mark.parametrize("arguments", WRITTEN, ids=lambda text: text[:30])
@pytest.mark.parametrize("kind", ["function", "custom", "tool_search", "local_shell", "shell", "apply_patch"])
def test_whatever_arguments_a_model_writes_are_sent(kind: str, arguments: str) -> None:
    """As the item of a call, and as the block of one."""
    tool = ClientTool(kind, "f", FunctionDefinition(name="f"))
    if kind in ("local_shell", "shell"):
        arguments = arguments.replace("{", '{"command": ["x"], "commands": ["x"], ', 1)
    assert parse_json(write_json(tool.to_item(arguments)))
    content = ContentBlocks()
    events = content.feed(ChatOutput("", "", [ParsedToolCall("f", arguments)]))
    assert write_json([*events, *content.close(), *content.blocks])
