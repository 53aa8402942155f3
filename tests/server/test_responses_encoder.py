"""The encoder of responses, fed by hand: items, events in order, reasoning, calls; the client reads the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from openai import omit
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from retain.engine.request import FinishReason, Logprob
from retain.server.openai.chat_output import ChatOutputParser, ReasoningParser, TaggedAnswerParser, ToolParser
from retain.server.openai.errors import APIError
from retain.server.openai.responses import encoder as responses_encoder
from retain.server.openai.responses.client_tools import ClientTools, expand_tools
from retain.server.openai.responses.encoder import ResponsesEncoder
from retain.server.openai.responses.history import ITEMS
from retain.server.openai.responses.items import decode_reasoning
from retain.server.openai.responses.protocol import ResponsesRequest
from retain.server.openai.responses.tools import FunctionTool
from retain.server.request_group import OutputDelta
from retain.server.tool_formats import load_tool_format
from retain.server.usage import GroupUsage

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
EOS = 0  # the only special token


class PieceTokenizer:
    """A token is a piece of the text, numbered from 1."""

    special_token_ids = frozenset([EOS])

    def __init__(self, pieces: Sequence[str]):
        self.pieces = ["<eos>", *pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids if i != EOS)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()


@pytest.fixture(autouse=True)
def fixed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_encoder, "count_tokens", lambda group: GroupUsage(9, 4, None, 7))
    monkeypatch.setattr(responses_encoder, "build_request_stats", lambda processor, group: [{"kv": {}}])


def encode(pieces: Sequence[str], end: FinishReason = FinishReason.STOP, **fields: Any) -> tuple[list[Any], Any]:
    """Encode an answer of these pieces, a token each, as a stream and in full. Returns events and full response."""
    body = ResponsesRequest(model="m", input="x", **fields)

    tools = expand_tools(body.tools or [FunctionTool(type="function", name="f")])
    names = [tool.function.name for tool in tools.to_params() or ()]

    def create_encoder() -> ResponsesEncoder:
        tool_parser = ToolParser(load_tool_format("hermes")(), names)
        parser = ChatOutputParser(TaggedAnswerParser(tool_parser, ReasoningParser(False)))
        return ResponsesEncoder(body, parser, PieceTokenizer(pieces), None, tools)  # type: ignore[arg-type]

    group = SimpleNamespace()
    deltas = [OutputDelta(0, text, [i], [Logprob(i, -0.5, ())]) for i, text in enumerate(pieces, 1)]
    deltas.append(OutputDelta(0, "", [EOS], [Logprob(EOS, -0.1, ())], end))
    stream, whole = create_encoder(), create_encoder()
    data = stream.encode_start(group)  # type: ignore[arg-type]
    for delta in deltas:
        data += stream.encode_delta(delta)
        whole.update(delta)
    data += stream.encode_end(group)  # type: ignore[arg-type]
    return read_events(data), json.loads(whole.encode_full(group))  # type: ignore[arg-type]


def read_events(data: bytes) -> list[Any]:
    """Read server-sent events; names and numbers must fit."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, content = block.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """Leave out what differs between two equal answers."""
    if isinstance(value, list):
        return [without_ids(x) for x in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return value


def text_of(item: Any) -> str:
    return item["content"][0]["text"]


REASONED = ["<think>", "\nwhy", " not", "</think>", "\n\n", "so", " it is"]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        ["\n"],
        ["Hello", " world"],
        REASONED,
        ["<think>", "\n\n", "</think>", "\n\n", "so"],
        ["Let me see. ", CALL, "\n", CALL],
        ["\n", CALL],
        [CALL, "done"],
        [*REASONED[:4], CALL],
    ],
)
def test_stream_ends_with_the_full_response(pieces: list[str]) -> None:
    """The client's own accumulator reads the events, and finds the items of the last one."""
    events, full = encode(pieces)
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(full)
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=omit, text_format=omit)
    built: dict[int, Any] = {}
    for event in events:
        state.handle_event(construct_type_unchecked(type_=ResponseStreamEvent, value=event))  # type: ignore[arg-type]
        index = event.get("output_index")
        if event["type"] == "response.output_item.added":
            assert index == len(built) and event["item"]["status"] == "in_progress"
            built[index] = ""
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == events[-1]["response"]["output"][index]["id"]
            built[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"] == events[-1]["response"]["output"][index]
    items = events[-1]["response"]["output"]
    assert list(built.values()) == [item.get("arguments") or text_of(item) for item in items]
    assert {item["status"] for item in items} == {"completed"}


def test_order_of_events() -> None:
    events, _ = encode(["<think>", "why", "</think>", "so", CALL])
    names = [event["type"].removeprefix("response.") for event in events]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert names == [
        *["created", "in_progress"],
        *[*opened, "reasoning_text.delta", "reasoning_text.done", *closed],
        *[*opened, "output_text.delta", "output_text.done", *closed],
        *["output_item.added", *arguments, "output_item.done"],
        "completed",
    ]


TOOLS = [
    {"type": "custom", "name": "edit"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]},
]


def call_of(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "events"),
    [
        (
            "edit",
            {"input": "+é\n"},
            {"type": "custom_tool_call", "name": "edit", "input": "+é\n"},
            ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
        ),
        (
            "ns__g",
            {"input": "x"},
            {"type": "custom_tool_call", "name": "g", "namespace": "ns", "input": "x"},
            ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
        ),
        (
            "ns__f",
            {"x": 1},
            {"type": "function_call", "name": "f", "namespace": "ns", "arguments": '{"x": 1}'},
            ["function_call_arguments.delta", "function_call_arguments.done"],
        ),
        (
            "local_shell",
            {"command": ["ls"]},
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls"], "env": {}},
            },
            [],
        ),
    ],
)
def test_calls_of_every_kind(name: str, arguments: Any, expected: Any, events: list[str]) -> None:
    stream, full = encode(["So. ", call_of(name, arguments)], tools=TOOLS)
    item = full["output"][1]
    assert without_ids(item) == {**expected, "status": "completed"} and item["call_id"] and item["id"]
    assert without_ids(stream[-1]["response"]) == without_ids(full)
    about = [event for event in stream if event.get("output_index") == 1]
    names = ["output_item.added", *events, "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in about] == names
    assert about[0]["item"]["status"] == "in_progress" and without_ids(about[-1]["item"]) == without_ids(item)
    for event in about:
        construct_type_unchecked(type_=ResponseStreamEvent, value=event)  # type: ignore[arg-type]
    if events:
        text = item.get("input") or item.get("arguments")
        assert about[1]["delta"] == text == about[2].get("input", about[2].get("arguments"))
        assert about[0]["item"].get("input", about[0]["item"].get("arguments")) == ""
    ITEMS.validate_python(full["output"])  # the client sends it back


def test_reasoning_is_also_encoded_where_the_client_asks() -> None:
    events, full = encode(REASONED, include=["reasoning.encrypted_content"])
    assert decode_reasoning(full["output"][0]["encrypted_content"]) == "\nwhy not"
    done = next(e["item"] for e in events if e["type"] == "response.output_item.done")
    assert done["encrypted_content"] == full["output"][0]["encrypted_content"]
    assert "encrypted_content" not in encode(REASONED)[1]["output"][0]


def test_prompt_that_is_only_computed_has_no_output() -> None:
    events, full = encode(["Hi"], FinishReason.LENGTH, generate=False)
    assert (full["status"], full["output"], full["usage"]["output_tokens"]) == ("completed", [], 0)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names == ["created", "in_progress", "completed"] and full["usage"]["total_tokens"] == 9


def test_reasoning_is_an_item_and_its_tokens_are_counted() -> None:
    _, full = encode(REASONED)
    reasoning, message = full["output"]
    assert reasoning["type"] == "reasoning" and text_of(reasoning) == "\nwhy not" and reasoning["summary"] == []
    assert reasoning["content"][0]["type"] == "reasoning_text"
    assert message["role"] == "assistant" and text_of(message) == "so it is"
    assert full["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 16,
    }


def test_reasoning_that_is_cut_is_incomplete() -> None:
    events, full = encode(REASONED[:3], FinishReason.LENGTH)
    (reasoning,) = full["output"]
    assert events[-1]["type"] == "response.incomplete" and full["status"] == reasoning["status"] == "incomplete"
    assert full["incomplete_details"] == {"reason": "max_output_tokens"} and full["completed_at"] is None
    assert full["usage"]["output_tokens_details"]["reasoning_tokens"] == 4  # and the token at which it was cut


def test_logprobs_are_those_of_the_text() -> None:
    """Not those of reasoning, calls and the end of text."""
    events, full = encode([*REASONED, CALL], include=["message.output_text.logprobs"])
    tokens = [p["token"] for p in full["output"][1]["content"][0]["logprobs"]]
    streamed = [p["token"] for e in events if e["type"] == "response.output_text.delta" for p in e["logprobs"]]
    assert tokens == streamed == ["\n\n", "so", " it is"]
    assert encode(["a"])[1]["output"][0]["content"][0]["logprobs"] == []


def test_logprobs_leave_out_a_special_token_that_comes_with_text() -> None:
    """With speculation a delta has several tokens, the end of text among them."""
    body = ResponsesRequest(model="m", input="x", include=["message.output_text.logprobs"])
    encoder = ResponsesEncoder(body, ChatOutputParser(), PieceTokenizer(["Hi"]), None, ClientTools())  # type: ignore[arg-type]
    logprobs = [Logprob(1, -0.5, ()), Logprob(EOS, -0.1, ())]
    encoder.update(OutputDelta(0, "Hi", [1, EOS], logprobs, FinishReason.STOP))
    (item,) = json.loads(encoder.encode_full(SimpleNamespace()))["output"]  # type: ignore[arg-type]
    assert [p["token"] for p in item["content"][0]["logprobs"]] == ["Hi"]


def test_blank_text_around_calls_is_no_item() -> None:
    _, full = encode(["\n", CALL, "\n", CALL, "\n"])
    assert [item["type"] for item in full["output"]] == ["function_call", "function_call"]
    assert len({item["call_id"] for item in full["output"]}) == 2
    assert json.loads(full["output"][0]["arguments"]) == {"x": 1}
    _, full = encode(["\n", call_of("edit", {"input": "x"}), "\n"], tools=TOOLS)
    assert [item["type"] for item in full["output"]] == ["custom_tool_call"]


def test_failed_stream_ends_with_error_and_failed_response() -> None:
    body = ResponsesRequest(model="m", input="x")
    encoder = ResponsesEncoder(body, ChatOutputParser(), PieceTokenizer(["Hi"]), None, ClientTools())  # type: ignore[arg-type]
    data = encoder.encode_start(SimpleNamespace()) + encoder.encode_delta(OutputDelta(0, "Hi", [1]))  # type: ignore
    error, failed = read_events(data + encoder.encode_stream_error(APIError(400, "bad", "response_format")))[-2:]
    assert (error["type"], error["message"], error["param"]) == ("error", "bad", "text.format")
    response = failed["response"]
    assert failed["type"] == "response.failed" and response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "bad"}
    assert text_of(response["output"][0]) == "Hi" and response["output"][0]["status"] == "incomplete"


def test_finished_response_is_kept_before_it_is_sent() -> None:
    kept = {}
    body = ResponsesRequest(model="m", input="x")
    encoder = ResponsesEncoder(
        body,
        ChatOutputParser(),
        PieceTokenizer(["Hi"]),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        ClientTools(),
        on_finish=lambda response, encoded: kept.update({response["id"]: encoded}),
    )
    encoder.update(OutputDelta(0, "Hi", [1], (), FinishReason.STOP))
    full = encoder.encode_full(SimpleNamespace())  # type: ignore[arg-type]
    assert kept == {json.loads(full)["id"]: full}


def test_a_response_repeats_json_of_any_depth() -> None:
    """It is encoded by itself, before the response is: so the response adds no level."""
    parameters: dict[str, Any] = {}
    for _ in range(251):
        parameters = {"a": parameters}
    tool = FunctionTool(type="function", name="f", parameters=parameters)
    events, full = encode(["x"], tools=[tool])
    assert [e["response"]["tools"][0]["parameters"] for e in events if "response" in e] == [parameters] * 3
    assert full["tools"][0]["parameters"] == parameters
