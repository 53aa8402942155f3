"""Bodies of Anthropic's API: every field and type of its SDK is honoured, accepted or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from retain.server.anthropic.blocks import AssistantBlock, CacheableBlock, UserBlock
from retain.server.anthropic.conversion import cut_at_breakpoints, to_chat_request
from retain.server.anthropic.errors import to_validation_error
from retain.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from retain.server.anthropic.tools import Tool, TypedTool
from retain.server.client_fields import read_refused_types
from retain.server.openai.body import parse_body
from retain.server.openai.messages import to_template_messages
from retain.server.request_model import StrictModel

FIELDS = json.loads((Path(__file__).parent / "clients" / "messages" / "sdk" / "fields.json").read_text())
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EPHEMERAL = {"type": "ephemeral"}
FUNCTION = {"name": "f", "input_schema": {"type": "object"}}
BLOCKS = {kind: model for union in (UserBlock, AssistantBlock) for model in union.__origin__.__args__
          for kind in model.model_fields["type"].annotation.__args__}  # fmt: skip


def build_body(**fields: Any) -> MessagesRequest:
    data = json.dumps({"model": "m", "max_tokens": 5, "messages": QUESTION, **fields}).encode()
    body: MessagesRequest = parse_body(data, TypeAdapter(MessagesRequest))
    return body


def refusal_of(**fields: Any) -> str:
    """Return the message with which a body is refused."""
    with pytest.raises(Exception) as refused:
        build_body(**fields)
    error = refused.value
    return to_validation_error(error.errors()).message  # type: ignore[attr-defined]


def template_messages(messages: list[Any], **fields: Any) -> list[tuple[str, str]]:
    """Return a conversation as its template sees it: roles and texts."""
    chat = to_chat_request(build_body(messages=messages, **fields))
    return [(message["role"], message["content"]) for message in to_template_messages(chat.messages)]


def knows(model: type[StrictModel], field: str) -> bool:
    return field in model.model_fields or field in model.other_fields or model.model_config.get("extra") == "ignore"


# ---- the SDK's fields and types --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "key"), [(MessagesRequest, "request"), (CountTokensRequest, "count_tokens")])
def test_every_field_of_a_request_is_known(model: type[StrictModel], key: str) -> None:
    assert [field for field in FIELDS[key] if not knows(model, field)] == []


@pytest.mark.parametrize("kind", FIELDS["blocks"])
def test_every_type_of_a_block_is_known(kind: str) -> None:
    if kind in read_refused_types():
        message = refusal_of(messages=[{"role": "user", "content": [{"type": kind}]}])
        assert (
            message == f"messages.0.content.0: the type '{kind}' is not supported here: " + (read_refused_types()[kind])
        )
    else:
        assert [field for field in FIELDS["blocks"][kind] if not knows(BLOCKS[kind], field)] == []


@pytest.mark.parametrize("kind", FIELDS["tools"])
def test_every_type_of_a_tool_is_a_function_or_left_out(kind: str) -> None:
    fields = FIELDS["tools"][kind]
    given = {"type": kind, "name": "n"} if kind != "custom" else FUNCTION | {"type": kind, "name": "n"}
    (tool,) = build_body(tools=[given | {"cache_control": EPHEMERAL}]).tools or []
    assert [field for field in fields if not knows(type(tool), field)] == []
    assert isinstance(tool, Tool if kind == "custom" else TypedTool)
    body = build_body(tools=[given, FUNCTION])
    family = kind.rpartition("_20")[0]
    if family in ("bash", "text_editor", "memory"):
        assert len(body.functions) == 2 and not body.left_out_tools
        schema = body.functions[0]["parameters"]
        assert schema["type"] == "object" and set(schema.get("required", ())) <= set(schema["properties"])
    elif kind != "custom":
        assert [function["name"] for function in body.functions] == ["f"]
        assert [tool.kind for tool in body.left_out_tools] == [family or kind]


def test_an_unknown_type_of_a_tool_is_refused() -> None:
    assert refusal_of(tools=[{"type": "telepathy_20270101", "name": "t"}]).startswith("tools.0.type: ")


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250124", "str_replace_editor", "old_str"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
def test_a_tool_that_the_client_runs_has_the_documented_input(kind: str, name: str, parameter: str) -> None:
    (function,) = build_body(tools=[{"type": kind, "name": name}]).functions
    assert function["name"] == name and parameter in function["parameters"]["properties"]
    commands = function["parameters"]["properties"]["command"].get("enum", [])
    assert ("undo_edit" in commands) == (kind == "text_editor_20250124")


@pytest.mark.parametrize(
    ("tools", "tool_choice", "words"),
    [
        ([{"type": "web_search_20250305", "name": "web_search"}, FUNCTION], "web_search", "cannot be called here"),
        ([{"type": "web_search_20250305", "name": "web_search"}], None, "that can be called here"),
    ],
)
def test_a_tool_that_was_left_out_cannot_be_forced(tools: list[Any], tool_choice: str | None, words: str) -> None:
    choice = {"type": "tool", "name": tool_choice} if tool_choice else {"type": "any"}
    assert words in refusal_of(tools=tools, tool_choice=choice)


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"betas": ["context-management-2025-06-27"], "diagnostics": {"previous_message_id": None}},
        {"fallbacks": [{"model": "claude-sonnet-5"}]},
        {"fallbacks": "default", "speed": "fast", "inference_geo": "eu", "service_tier": "auto"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 20000}}},
        {"thinking": {"type": "adaptive", "display": "updates"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted", "block_binding": {}}},
        {"container": {"id": None, "skills": []}, "metadata": {"user_id": "user_1"}, "top_k": 40},
        {"stop_sequences": [], "system": None, "tools": None, "tool_choice": None},
        {"stop_sequences": ["\n\nHuman:", "  "]},
        {"mcp_servers": [{"type": "url", "name": "docs", "url": "https://x", "tool_configuration": None}]},
        {"tools": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    ],
)
def test_a_field_that_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    chat = to_chat_request(build_body(**fields))
    assert chat.messages == to_chat_request(build_body()).messages and chat.tools is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compaction": {"type": "summarize"}}, "compaction: is not supported: "),
        ({"thread": {"id": "t"}}, "thread: is not supported: "),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]},
         "the last message calls a tool"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": ""}}]}]},
         "messages.0.content.0.source: the type 'base64' is not supported here: send a document as text"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}]}]},
         "messages.0.content.0.content.0: the type 'image' is not supported here: the model reads text only"),
    ],
)  # fmt: skip
def test_a_field_that_would_change_the_answer_is_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal_of(**fields)


def test_breakpoints_are_found_wherever_clients_put_them() -> None:
    """Any number, with scopes: they are hints, and only the last of each lifetime costs anything."""
    marked = {"cache_control": EPHEMERAL | {"ttl": "1h", "scope": "global"}}
    text, inner = {"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": EPHEMERAL}
    thinking = {"type": "thinking", "thinking": "t", "signature": "", **marked}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}, **marked}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [inner, text]}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [thinking, call]},
        {"role": "user", "content": [result, text]},
    ]
    tools = [FUNCTION | marked | {"name": name} for name in "fgh"]
    body = build_body(system=[text | marked] * 3, tools=tools, messages=messages)
    cuts = cut_at_breakpoints(body)
    assert list(cuts) == [3600, 300]
    hour, minutes = cuts[3600], cuts[300]
    assert hour and len(hour.messages) == 2 and hour.messages[-1].content[-1].type == "tool_use"  # type: ignore[union-attr]
    assert minutes and len(minutes.messages) == 3 and len(minutes.messages[-1].content) == 1


# ---- blocks as text --------------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "Look:", "citations": None}
DOCUMENT = {"type": "document", "title": "T", "citations": {"enabled": True}}
PLAIN = DOCUMENT | {"source": {"type": "text", "media_type": "text/plain", "data": "plain"}}
NESTED = DOCUMENT | {"source": {"type": "content", "content": [{"type": "text", "text": "nested"}]}}
FOUND = {"type": "search_result", "source": "https://x", "title": "T", "content": [{"type": "text", "text": "found"}]}


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([TEXT, PLAIN, NESTED], "Look:\n\nT\nplain\n\nT\nnested"),
        ([FOUND, TEXT], "T\nhttps://x\nfound\n\nLook:"),
        ([TEXT, {"type": "text", "text": " a"}], "Look: a"),
        ([{"type": "text", "text": ""}, {"type": "text", "text": "  \n"}], "  \n"),
        ([], ""),
    ],
)
def test_blocks_of_a_user_become_text(blocks: list[Any], text: str) -> None:
    assert template_messages([{"role": "user", "content": blocks}]) == [("user", text)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"type": "tool_reference", "tool_name": name} for name in ("read", "write")], "read\n\nwrite"),
        ([TEXT, PLAIN, FOUND], "Look:\n\nT\nplain\n\nT\nhttps://x\nfound"),
    ],
)
def test_parts_of_a_result_become_text(content: Any, text: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    assert template_messages([{"role": "user", "content": [result]}]) == [("tool", text)]


def hosted(kind: str, content: Any) -> dict[str, Any]:
    return {"type": f"{kind}_tool_result", "tool_use_id": "t", "content": content}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (hosted("web_search", [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "e"}]),
         "T\nu"),
        (hosted("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}), ""),
        (hosted("web_fetch", {"type": "web_fetch_result", "url": "u", "content": PLAIN}), "u\nT\nplain"),
        (hosted("web_fetch", {"type": "web_fetch_result", "url": "u", "content": DOCUMENT | {
            "source": {"type": "base64", "data": "JVBERi0="}}}), "u\nT"),
        (hosted("bash_code_execution", {"stdout": "1", "stderr": "", "return_code": 0, "content": []}), "1"),
        (hosted("tool_search", {"tool_references": [{"type": "tool_reference", "tool_name": "read"}]}), "read"),
        (hosted("mcp", [{"type": "text", "text": "m"}]), "m"),
        ({"type": "server_tool_use", "id": "t", "name": "web_search", "input": {"query": "q"}, "caller": {}}, ""),
        ({"type": "mcp_tool_use", "id": "t", "name": "n", "input": {}, "server_name": "s"}, ""),
        ({"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}}, ""),
        ({"type": "redacted_thinking", "data": "x"}, ""),
        ({"type": "compaction", "content": "A summary.", "encrypted_content": "e", "signature": "s"}, "A summary."),
        ({"type": "compaction", "content": None}, ""),
    ],
)  # fmt: skip
def test_blocks_of_other_servers_become_text_where_they_have_any(block: dict[str, Any], text: str) -> None:
    said = {"type": "text", "text": "So."}
    messages = [*QUESTION, {"role": "assistant", "content": [block, said]}, *QUESTION]
    shown = template_messages(messages)[1]
    assert shown == ("assistant", f"{text}\n\nSo." if text else "So.")


def test_a_system_message_is_cleared_by_the_next_user_message() -> None:
    note = {"role": "system", "content": "Note.", "clear_at": "next_user_message", "output_config": {"effort": "low"}}
    kept = {"role": "system", "content": [TEXT], "clear_at": "never"}
    assert template_messages([*QUESTION, note, kept])[1:] == [("system", "Note.\n\nLook:")]
    assert template_messages([*QUESTION, note, kept, *QUESTION])[1] == ("system", "Look:")


# ---- continuing an answer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "continues"),
    [
        ("{", True),
        ([{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "{"}], True),
        (None, False),
    ],
)
def test_a_last_message_of_the_assistant_is_continued(content: Any, continues: bool) -> None:
    messages = [*QUESTION, *([{"role": "assistant", "content": content}] if continues else [])]
    chat = to_chat_request(build_body(messages=messages))
    assert (chat.continue_final_message, chat.add_generation_prompt) == (continues, not continues)
    assert to_template_messages(chat.messages)[-1]["content"] == ("{" if continues else QUESTION[0]["content"])


def test_no_block_is_both_a_breakpoint_and_unknown() -> None:
    """Every block may be a breakpoint: a client that marks one that Anthropic does not allow gets its answer."""
    assert all(issubclass(model, CacheableBlock) for model in BLOCKS.values())


@pytest.mark.parametrize("kind", [["x"], {"x": 1}, 7, None, True])
def test_a_result_of_a_hosted_tool_may_hold_anything(kind: Any) -> None:
    block = {"type": "web_search_tool_result", "tool_use_id": "a", "content": {"type": kind, "text": "t"}}
    assert TypeAdapter(UserBlock).validate_python(block).prompt_text == "t"


def test_tools_of_one_kind_are_told_apart_and_names_are_distinct() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    searches = [{"type": f"web_search_{date}", "name": f"search_{date}"} for date in (20250305, 20260209)]
    for tool in searches:
        choice = {"type": "tool", "name": tool["name"]}
        with pytest.raises(ValidationError, match="cannot be called here"):
            MessagesRequest.model_validate({**body, "tools": searches, "tool_choice": choice})
    twice = [{"type": "bash_20250124", "name": "bash"}, {"name": "bash", "input_schema": {"type": "object"}}]
    with pytest.raises(ValidationError, match="two tools have the same name"):
        MessagesRequest.model_validate({**body, "tools": twice})
