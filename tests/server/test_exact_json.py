"""Numbers of clients and models keep their digits: in bodies, in the history and in answers."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from retain.server.anthropic.content_blocks import ContentBlocks
from retain.server.anthropic.protocol import MessagesRequest
from retain.server.exact_json import parse_json, write_json
from retain.server.launch import GracefulServer
from retain.server.openai.body import parse_body
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.tool_format import ChatOutput, ParsedToolCall
from tests.server.conftest import HTTP

INTEGERS = st.integers(-(2**80), 2**80) | st.sampled_from([2**63, 2**64, -(2**63) - 1, 2**53 + 1, 10**300])
NUMBERS = INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none() | st.text(max_size=3)
VALUES = st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def exactly(x: Any) -> str:
    """Return a text that is equal for equal values of equal types."""
    return json.dumps(x, sort_keys=True)


@given(VALUES)
def test_what_is_written_is_read_as_it_was(value: Any) -> None:
    text = write_json(value)
    assert exactly(parse_json(text)) == exactly(value) == exactly(json.loads(text))
    assert exactly(parse_json(json.dumps(value, indent=1).encode())) == exactly(value)


def test_fragments_stay_beside_large_integers() -> None:
    assert write_json({"a": orjson.Fragment(b"[1]"), "b": (2**70, True)}) == f'{{"a":[1],"b":[{2**70},true]}}'.encode()
    with pytest.raises(TypeError):
        write_json({"a": object()})


@given(INTEGERS)
def test_bodies_keep_their_integers(number: int) -> None:
    schema = {"const": number, "enum": [[number]]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": wanted}
    parsed = parse_body(json.dumps(body).encode(), TypeAdapter(ChatCompletionRequest))
    assert parsed.response_format.json_schema.schema_ == schema
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": number}}
    result = {"type": "tool_result", "tool_use_id": "t"}
    messages = [{"role": r, "content": [b]} for r, b in (("assistant", call), ("user", result))]
    data = json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
    assert parse_body(data, TypeAdapter(MessagesRequest)).messages[0].content[0].input == {"a": number}


@given(INTEGERS)
def test_a_call_of_a_message_has_the_integers_that_the_model_writes(number: int) -> None:
    content = ContentBlocks()
    content.feed(ChatOutput("", "", [ParsedToolCall("f", f'{{"a": {number}}}')]))
    content.close()
    assert content.blocks[0]["input"] == {"a": number}
    assert json.loads(write_json(content.blocks[0]))["input"] == {"a": number}


def test_a_response_repeats_the_integers_of_its_request(tiny_server: GracefulServer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 2**64 + 1}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    body = {"model": "smollm2", "input": "x", "max_output_tokens": 1, "text": text, "tools": [tool]}
    for stream in (False, True):
        response = HTTP.post(f"{tiny_server.url}/responses", json={**body, "tool_choice": "none", "stream": stream})
        assert response.status_code == 200, response.text
        assert response.text.count(str(2**64 + 1)) >= 2
