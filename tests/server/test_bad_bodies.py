"""What a bad field of a request's body is told: status 400, and one clear line that names the field."""

from typing import Any

import pytest

from retain.server.launch import GracefulServer
from tests.server.conftest import HTTP

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = [{"role": "user", "content": "word " * 5000}]
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
URL = {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/a.png"}]}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
PREFILL = {"role": "assistant", "content": "{"}
NAMED = {"type": "function", "name": "f"}
ENUM = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
FORMAT = "response_format"
OUTPUT = "function_call_output"
LIMITS = {"max_tokens": 4}
GOOD: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": QUESTION, **LIMITS},
    "responses": {"input": QUESTION, "max_output_tokens": 4},
    "messages": {"messages": QUESTION, **LIMITS},
}
# A path, fields that replace those of a good body, the parameter that the error names, and some of its words.
BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("chat/completions", {"temperature": 3}, "temperature", "temperature"),
    ("chat/completions", {"messages": LONG}, "messages", "context"),
    ("chat/completions", {"messages": []}, "messages", "messages"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "content"),
    ("chat/completions", {"kv_policy": "nothing:x=1"}, None, "unknown KV policy"),
    ("chat/completions", {"kv_policy": "h2o"}, None, "needs budget"),
    ("chat/completions", {"kv_policy": "gate:budget=9,file=/etc/passwd"}, "kv_policy", "cannot name a file"),
    ("chat/completions", {"kv_policy": "press:budget=9,press=os.path"}, "kv_policy", "cannot name a file"),
    ("chat/completions", {"speculate": "draft:model=/etc/passwd"}, "speculate", "speculate is one of"),
    ("chat/completions", {"frobnicate": 1}, "frobnicate", "frobnicate"),
    ("chat/completions", {"n": 1000}, "n", "n"),
    ("chat/completions", {"stop": [""]}, "stop.0", "stop"),
    ("chat/completions", {"logit_bias": {"99999999": 1.0}}, None, "vocabulary"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools"),
    ("chat/completions", {FORMAT: {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ("chat/completions", {FORMAT: {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, None,
     "must be one or several of"),
    ("chat/completions", {FORMAT: {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, None,
     "no value matches"),
    ("chat/completions", {"pin": 10**9}, "pin", "pin"),
    # What gateways send with the values that change nothing; others would change the answer
    ("chat/completions", {"no_stop_trim": True}, "no_stop_trim", ""),
    ("chat/completions", {"skip_special_tokens": False}, "skip_special_tokens", ""),
    ("chat/completions", {"return_hidden_states": True}, "return_hidden_states", ""),
    ("chat/completions", {"separate_reasoning": False}, "separate_reasoning", ""),
    ("chat/completions", {"stream_reasoning": False}, "stream_reasoning", ""),
    # Variables of the server, which no template may get from a client
    *(("chat/completions", {"chat_template_kwargs": {name: "x"}}, None, "")
      for name in ("messages", "tools", "add_generation_prompt", "raise_exception", "range")),
    *(("chat/completions", {"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}", "pattern")
      for name in ("a b", "")),
    ("responses", {"input": [URL]}, "input.0.content.0", "images"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0", "files"),
    ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item not found"),
    ("responses", {"input": [{"type": "compaction_trigger"}]}, "input.0", "items"),
    ("responses", {"input": [{"role": "user"}]}, "input.0.content", "required"),
    ("responses", {"input": 3}, "input", "list"),
    ("responses", {"input": [{"type": OUTPUT, "call_id": "c", "output": ""}]}, "input", "call_id"),
    ("responses", {"input": [{"type": OUTPUT, "output": ""}]}, "input.0.call_id", "required"),
    ("responses", {"input": "x", "tools": [{"type": "telepathy"}]}, "tools.0", "local_shell"),
    ("responses", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools.0.tools.0",
     "custom"),
    ("responses", {"tools": [NAMED, {**NAMED, "type": "custom"}]}, "tools", "two tools have the name f"),
    ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice",
     "does not run web_search"),
    ("responses", {"tools": [{"type": "function", "name": "f", "parameters": {}}]}, "tools", "tools"),
    ("responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "without tools"),
    ("responses", {"tools": [NAMED], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice", "unknown tool"),
    ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice", "client runs"),
    ("responses", {"background": True}, "background", "support"),
    ("responses", {"conversation": "conv_1"}, "conversation", "support"),
    ("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort", "high"),
    ("responses", {"prompt": {"id": "p"}}, "prompt", "support"),
    ("responses", {"truncation": "middle"}, "truncation", "disabled"),
    ("responses", {"include": ["everything"]}, "include.0", "message.output_text.logprobs"),
    ("responses", {"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
    ("responses", {"text": {"verbosity": "none"}}, "text.verbosity", "medium"),
    ("responses", {"max_tokens": 5}, "max_tokens", "unknown field"),
    ("responses", {"temperature": 3}, "temperature", "2"),
    ("responses", {"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
    ("responses", {"pin": 10**9}, "pin", "pin"),
    ("responses", {"kv_policy": "nothing"}, None, "unknown KV policy"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "never stored"),
    ("messages", {"max_tokens": -1}, None, "max_tokens:"),
    ("messages", {"temperature": 1.5}, None, "temperature:"),
    ("messages", {"x": 1}, None, "x: unknown"),
    ("messages", {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, None,
     "messages.0.content.1: the type 'image'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None,
     "messages.0.content.0.text: Field required"),
    ("messages", {"messages": [*QUESTION, {"role": "assistant", "content": [TOOL_USE]}]}, None,
     "the last message calls a tool"),
    ("messages", {"tools": [{"type": "telepathy_20270101", "name": "t"}]}, None,
     "tools.0.type: 'telepathy_20270101'"),
    ("messages", {"messages": [*QUESTION, PREFILL], "output_config": ENUM}, None, "the answer continues a message"),
    ("messages", {"tool_choice": {"type": "any"}}, None, "tool_choice without tools"),
    ("messages", {"kv_policy": "x"}, None, "unknown KV policy"),
    ("messages", {"kv_policy": "gate:budget=9,file=/etc/passwd"}, None, "cannot name a file"),
    ("messages", {"messages": LONG}, None, "prompt is too long"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "words"), BAD)
def test_a_bad_field_gets_one_line(
    path: str, fields: dict[str, Any], param: str | None, words: str, server: GracefulServer
) -> None:
    response = HTTP.post(f"{server.url}/{path}", json={"model": "smollm2", **GOOD[path], **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and "\n" not in error["message"]
    if path == "messages":
        assert response.json() == {"type": "error", "error": error} and error["type"] == "invalid_request_error"
        return
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
