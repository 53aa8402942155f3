"""Tools of the Responses API: the functions that the model sees, and calls as the items that clients expect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from retain.server.openai.errors import APIError
from retain.server.openai.responses.client_tools import ClientTools, expand_tools
from retain.server.openai.responses.conversion import convert_request, to_messages
from retain.server.openai.responses.history import ITEMS
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.responses.tools import HOSTED_TOOLS, Tool
from retain.server.tool_format import ParsedToolCall

Json = dict[str, Any]
TOOLS: TypeAdapter[list[Tool]] = TypeAdapter(list[Tool])

FUNCTION = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "edit", "description": "Edits."}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files on a server.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "defer_loading": True},
        {"type": "custom", "name": "patch"},
    ],
}
ALL_KINDS = [
    FUNCTION,
    CUSTOM,
    NAMESPACE,
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools."},
]


def expand(*tools: Json) -> ClientTools:
    return expand_tools(TOOLS.validate_python(list(tools)))


def names_of(tools: ClientTools) -> list[str]:
    return [tool.function.name for tool in tools.to_params() or ()]


def convert(tools: list[Json], **fields: Any) -> Any:
    body = ResponsesRequest(model="m", input="x", tools=tools, **fields)
    return convert_request(body, ITEMS.validate_python([{"role": "user", "content": "x"}]))


def test_every_kind_is_a_function() -> None:
    functions = {tool.function.name: tool.function for tool in expand(*ALL_KINDS).to_params() or ()}
    assert list(functions) == [
        "read",
        "edit",
        "mcp__files__find",
        "mcp__files__patch",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    ]
    assert functions["mcp__files__find"].description == "Files on a server.\n\nFinds."
    assert functions["mcp__files__patch"].description is None, "a namespace is described once"
    assert (functions["edit"].parameters or {})["required"] == ["input"]


def test_a_namespace_that_ends_with_its_separator() -> None:
    assert names_of(expand({**NAMESPACE, "name": "mcp__files__"})) == names_of(expand(NAMESPACE))


@pytest.mark.parametrize(
    "kind", [*HOSTED_TOOLS, "tool_search", "web_search_preview", "web_search_2025_08_26", "computer_use_preview"]
)
def test_hosted_tools_are_left_out(kind: str) -> None:
    hosted = {"type": kind, "server_label": "x", "filters": {"allowed_domains": ["a"]}, "size": None}
    tools = expand(hosted, FUNCTION, hosted)
    assert names_of(tools) == ["read"] and tools.left_out == [kind]
    converted = convert([hosted])
    assert converted.chat.tools is None and converted.warnings == [f"tools left out: {kind}"]


@pytest.mark.parametrize("kind", ["other", "<other>", "", "hosted", "web"])
def test_a_tool_of_no_known_type_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError, match="the type is one of function, custom, namespace"):
        TypeAdapter(Tool).validate_python({"type": kind})


def test_a_shell_in_a_container_is_hosted() -> None:
    assert expand({"type": "shell", "environment": {"type": "container_auto"}}).left_out == ["shell"]
    assert names_of(expand({"type": "shell"})) == ["shell"]


def test_a_warning_is_short() -> None:
    (warning,) = convert([{"type": f"web_search_{i}"} for i in range(1000)]).warnings
    assert warning.endswith("web_search_15, and 984 more")


def test_a_type_cannot_write_headers() -> None:
    with pytest.raises(ValidationError):
        expand({"type": "web_search_\r\nx: y"})


def test_two_tools_with_one_name() -> None:
    assert names_of(expand(FUNCTION, FUNCTION)) == ["read"]
    with pytest.raises(APIError, match="two tools have the name read"):
        expand(FUNCTION, {**FUNCTION, "description": "another"})


CALLS: list[tuple[str, Json, str]] = [
    ("read", {"path": "a", "lines": [1, 2]}, "function_call"),
    ("edit", {"input": '*** Begin "Patch"\n+é\\n'}, "custom_tool_call"),
    ("mcp__files__find", {"name": "b"}, "function_call"),
    ("mcp__files__patch", {"input": ""}, "custom_tool_call"),
    ("local_shell", {"command": ["ls", "-l"], "working_directory": "/", "timeout_ms": 5}, "local_shell_call"),
    ("shell", {"commands": ["ls", "pwd"], "timeout_ms": 5}, "shell_call"),
    ("apply_patch", {"type": "update_file", "path": "a", "diff": "+b\n"}, "apply_patch_call"),
    ("apply_patch", {"type": "delete_file", "path": "a"}, "apply_patch_call"),
    ("tool_search", {"query": "tickets"}, "tool_search_call"),
]


def send_back(item: Json) -> tuple[str, Json]:
    """Return the name and the arguments of a call in the messages of the next request."""
    (message,) = to_messages(ITEMS.validate_python([{**item, "id": "x_1", "call_id": "call_1"}]))
    ((call),) = message.tool_calls  # type: ignore[union-attr, misc]
    assert call.id == "call_1"
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize(("name", "arguments", "kind"), CALLS)
def test_the_model_sees_its_call_as_it_wrote_it(name: str, arguments: Json, kind: str) -> None:
    item = expand(*ALL_KINDS).to_item(ParsedToolCall(name, json.dumps(arguments)))
    assert item["type"] == kind and send_back(item) == (name, arguments)
    if name.startswith("mcp__"):
        assert (item["namespace"], item["name"]) == ("mcp__files", name.removeprefix("mcp__files__"))


@given(st.text())
def test_the_input_of_a_custom_tool_is_its_text(text: str) -> None:
    item = expand(CUSTOM).to_item(ParsedToolCall("edit", json.dumps({"input": text})))
    assert item["input"] == text and send_back(item) == ("edit", {"input": text})


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"patch": "+a"}', "+a"), ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'), ("{", "{")]
)
def test_a_custom_call_without_an_input(arguments: str, text: str) -> None:
    """Models write what they like where no grammar forces them."""
    assert expand(CUSTOM).to_item(ParsedToolCall("edit", arguments))["input"] == text


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
@pytest.mark.parametrize("arguments", ["", "[]", '{"command": 3}', '{"commands": "ls"}', '{"type": "update_file"}'])
def test_arguments_that_a_tool_cannot_have_are_a_function_call(kind: str, arguments: str) -> None:
    item = expand({"type": kind}).to_item(ParsedToolCall(kind, arguments))
    assert item == {"type": "function_call", "name": kind, "arguments": arguments}


def test_a_command_as_one_text_runs_in_a_shell() -> None:
    item = expand({"type": "local_shell"}).to_item(ParsedToolCall("local_shell", '{"command": "ls | wc"}'))
    assert item["action"]["command"] == ["bash", "-lc", "ls | wc"]


def test_a_regex_becomes_a_pattern_and_a_lark_grammar_is_described() -> None:
    regex = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    lark = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}
    ((function,), (described,)) = ([tool.function for tool in expand(t).to_params() or ()] for t in (regex, lark))
    assert (function.parameters or {})["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert (described.description or "").startswith("Edits.") and 'start: "a"' in (described.description or "")
    assert names_of(expand({**CUSTOM, "format": {"type": "text"}})) == ["edit"]


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ("auto", ["read", "edit", "mcp__files__find", "mcp__files__patch"], "auto"),
        ("required", ["read", "edit", "mcp__files__find", "mcp__files__patch"], "required"),
        ({"type": "custom", "name": "edit"}, None, "edit"),
        ({"type": "function", "name": "find"}, None, "mcp__files__find"),
        ({"type": "function", "name": "mcp__files__find"}, None, "mcp__files__find"),
        ({"type": "function", "name": "find", "namespace": "mcp__files"}, None, "mcp__files__find"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "edit"}, {"type": "mcp"}]},
            ["edit"],
            "auto",
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]},
            ["read"],
            "required",
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, [], None),
    ],
)
def test_choices(choice: Any, names: list[str] | None, forced: str | None) -> None:
    chat = convert([FUNCTION, CUSTOM, NAMESPACE], tool_choice=choice).chat
    if names is not None:
        assert [tool.function.name for tool in chat.tools or ()] == names and chat.tool_choice == forced
    else:
        assert chat.tool_choice.function.name == forced and len(chat.tools) == 4


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
def test_a_tool_without_a_name_is_forced_by_its_type(kind: str) -> None:
    assert convert([{"type": kind}], tool_choice={"type": kind}).chat.tool_choice.function.name == kind


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([], "required"),
        ([{"type": "web_search"}], "required"),
        ([FUNCTION], {"type": "custom", "name": "read"}),
        ([FUNCTION], {"type": "local_shell"}),
        ([NAMESPACE, {**NAMESPACE, "name": "other"}], {"type": "function", "name": "find"}),
        ([FUNCTION], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}),
    ],
)
def test_choices_that_cannot_be_made(tools: list[Json], choice: Any) -> None:
    with pytest.raises(APIError) as raised:
        convert(tools, tool_choice=choice)
    assert raised.value.param == "tool_choice"


def test_tools_that_a_conversation_adds() -> None:
    """They stay in a stored conversation."""
    items: list[Json] = [
        {"type": "additional_tools", "role": "developer", "tools": [CUSTOM]},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [NAMESPACE]},
        {"role": "user", "content": "x"},
    ]
    body = ResponsesRequest(model="m", input=items, tools=[FUNCTION])
    chat = convert_request(body, ITEMS.validate_python(items)).chat
    assert [tool.function.name for tool in chat.tools or ()] == [
        "read",
        "edit",
        "mcp__files__find",
        "mcp__files__patch",
    ]
    assert len(chat.messages) == 1


def test_tools_that_are_found_again() -> None:
    """The first description stays, so the prompt does not change."""
    again = {**NAMESPACE, "tools": [CUSTOM, *reversed(NAMESPACE["tools"])]}  # type: ignore[call-overload]
    outputs: list[Json] = [
        {"type": "tool_search_output", "tools": tools} for tools in ([NAMESPACE], [again], [FUNCTION])
    ]
    body = ResponsesRequest(model="m", input=outputs, tools=[FUNCTION])
    tools = convert_request(body, ITEMS.validate_python(outputs)).chat.tools or []
    names = ["read", "mcp__files__find", "mcp__files__patch", "mcp__files__edit"]
    assert [tool.function.name for tool in tools] == names
    assert tools[1].function.description == "Files on a server.\n\nFinds."


def test_tools_that_the_client_found() -> None:
    items: list[Json] = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "files"}},
        {
            "type": "tool_search_output",
            "call_id": "c",
            "execution": "client",
            "status": "completed",
            "tools": [NAMESPACE],
        },
    ]
    asked, found = to_messages(ITEMS.validate_python(items))
    assert asked.tool_calls[0].function.name == "tool_search"  # type: ignore[union-attr, index]
    assert (found.role, found.content) == ("tool", '{"tools": ["mcp__files__find", "mcp__files__patch"]}')
    body = ResponsesRequest(model="m", input=items)
    assert len(convert_request(body, ITEMS.validate_python(items)).chat.tools or ()) == 2
    by_server = [{**item, "execution": "server", "call_id": None} for item in items]
    converted = convert_request(body, ITEMS.validate_python(by_server))
    assert len(converted.chat.tools or ()) == 2 and converted.warnings == ["items left out: tool_search_call"]
