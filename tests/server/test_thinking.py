"""Models that think: what is demanded of an answer is demanded behind its reasoning, in every API and stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from retain.processing.grammar import grammar_from_lark
from retain.processing.lark import write_text
from retain.processing.reasoning import KNOWN_MARKS, ReasoningMarks
from retain.server.launch import GracefulServer
from tests.server.agent_model import AGENT_TEMPLATE, save_agent_model
from tests.server.conftest import HTTP, chat_template_replaced, run_server

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = '{"a": 1}'
CALL = f'<tool_call>{{"name": "f", "arguments": {FORM}}}</tool_call>'
REASONING = "I restate. Question: what? {} <tool_call"
MARKS = [marks for marks in KNOWN_MARKS if not marks.repeats]
FINISHED = {"stop": "stop", "end_turn": "stop", "stop_sequence": "stop", "completed": "stop", "tool_calls": "stop"}
FINISHED |= {"tool_use": "stop", "length": "length", "max_tokens": "length", "incomplete": "length"}


class Answer(NamedTuple):
    """The parts of an answer, alike in every API."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    finish: str


@pytest.fixture(scope="module", params=["text", "special tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GracefulServer]:
    """A model whose tokenizer writes marks as bytes, or as special tokens, which the text of an answer leaves out."""
    marks = [token for m in MARKS for token in re.findall(r"<[^<>]+>|\[[^]]+\]", "".join(m.texts))]
    special_tokens = [*marks, "<tool_call>", "</tool_call>"] if request.param == "special tokens" else []
    folder = save_agent_model(tmp_path_factory.mktemp("model"), "llama", special_tokens)
    with run_server(str(folder), {"kv_memory": "64MiB", "dtype": "float32"}, AGENT_TEMPLATE) as running:
        yield running


@contextmanager
def dictated(server: GracefulServer, text: str) -> Iterator[None]:
    """Let the model write a text, which the grammar that the request demands must accept, as far as it goes."""
    service = server.service
    prepare = service.prepare_chat_request

    def prepare_dictated(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        if prepared.request.grammar:
            state = service.llm.input_processor.grammar_compiler.compile(prepared.request.grammar)
            tokens = service.llm.tokenizer.encode_continuation(text)
            assert all(map(state.accept_token, tokens)), "the demanded grammar refuses the text"
        lark = f"start: {write_text(text, service.dialect.special_tokens)}"
        return prepared._replace(request=replace(prepared.request, grammar=grammar_from_lark(lark)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "prepare_chat_request", prepare_dictated)
        yield


def events_of(body: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post(server: GracefulServer, path: str, fields: dict[str, Any], stream: bool) -> Any:
    response = HTTP.post(f"{server.url}{path}", json={"model": "smollm2", "stream": stream, **fields})
    assert response.status_code == 200, response.text
    return events_of(response.text) if stream else response.json()


def ask_chat(server: GracefulServer, stream: bool, **fields: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": fields.pop("limit")}
    body |= {"reasoning_effort": "high"} if fields.pop("thinks") else {}
    if schema := fields.pop("schema", None):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if choice := fields.pop("choice", None):
        named = {"type": "function", "function": {"name": "f"}}
        body |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
        body["tool_choice"] = {"any": "required", "named": named}[choice]
    found = post(server, "/chat/completions", body | fields, stream)
    choices = [c for event in found for c in event["choices"]] if stream else found["choices"]
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    return Answer(
        "".join(message.get("reasoning_content") or "" for message in messages),
        "".join(message.get("content") or "" for message in messages),
        [(call["name"], json.loads(call["arguments"])) for call in calls],
        FINISHED[choices[-1]["finish_reason"]],
    )


def ask_messages(server: GracefulServer, stream: bool, **fields: Any) -> Answer:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    body["max_tokens"] = fields.pop("limit")
    if fields.pop("thinks"):
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if schema := fields.pop("schema", None):
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    if choice := fields.pop("choice", None):
        body["tools"] = [{"name": "f", "input_schema": SCHEMA}]
        body["tool_choice"] = {"any": {"type": "any"}, "named": {"type": "tool", "name": "f"}}[choice]
    if stop := fields.pop("stop", None):
        body["stop_sequences"] = stop
    found = post(server, "/messages", body, stream)
    blocks, reason = join_events(found) if stream else (found["content"], found["stop_reason"])
    return Answer(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        FINISHED[reason],
    )


def join_events(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the blocks of a streamed message, and why it stopped."""
    kinds = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    blocks: list[dict[str, Any]] = []
    reason = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "partial_json": ""})
        elif event["type"] == "content_block_delta":
            if name := kinds.get(event["delta"]["type"]):
                blocks[-1][name] += event["delta"][name]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return [{**block, "input": json.loads(block["partial_json"] or "null")} for block in blocks], reason


def ask_responses(server: GracefulServer, stream: bool, **fields: Any) -> Answer:
    body: dict[str, Any] = {"input": "hi", "temperature": 0, "max_output_tokens": fields.pop("limit")}
    body |= {"reasoning": {"effort": "high"}} if fields.pop("thinks") else {}
    if schema := fields.pop("schema", None):
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    if choice := fields.pop("choice", None):
        body["tools"] = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
        body["tool_choice"] = {"any": "required", "named": {"type": "function", "name": "f"}}[choice]
    found = post(server, "/responses", body | fields, stream)
    if stream:
        texts = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
        found = found[-1]["response"]
    items = found["output"]
    parts = [(item["type"], part) for item in items for part in item.get("content") or []]
    answer = Answer(
        "".join(part["text"] for kind, part in parts if kind == "reasoning"),
        "".join(part["text"] for kind, part in parts if kind == "message"),
        [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"],
        FINISHED[found["status"]],
    )
    assert not stream or texts == answer.content
    return answer


APIS = {"chat": ask_chat, "messages": ask_messages, "responses": ask_responses}


def template_of(marks: ReasoningMarks) -> str:
    """Return the agent's template with other marks, which it writes around answers, too, if the model does."""
    template = AGENT_TEMPLATE.replace("<think>", marks.begin).replace("</think>", marks.end)
    return template + f"{{# {marks.answer_begin} #}}{{% if false %}}{marks.answer_end}{{% endif %}}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.begin.strip("<>[|]"))
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("thinks", [True, False], ids=["opened by the prompt", "begun by the model"])
@pytest.mark.parametrize("demand", ["form", "any", "named"])
def test_what_is_demanded_follows_the_reasoning(
    server: GracefulServer, demand: str, thinks: bool, api: str, marks: ReasoningMarks, stream: bool
) -> None:
    begun = "" if thinks else marks.begin
    answer = FORM if demand == "form" else CALL
    if marks.answer_begin:
        answer = f"{marks.answer_begin}\n{answer}\n{marks.answer_end}"
    fields = {"schema": SCHEMA} if demand == "form" else {"choice": demand}
    with (
        chat_template_replaced(server, template_of(marks)),
        dictated(server, f"{begun}{REASONING}{marks.end}\n\n{answer}"),
    ):
        found = APIS[api](server, stream, thinks=thinks, limit=400, **fields)
    expected = (FORM, []) if demand == "form" else ("", [("f", {"a": 1})])
    assert (found.reasoning, (found.content.strip(), found.calls), found.finish) == (REASONING, expected, "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.begin.strip("<>[|]"))
@pytest.mark.parametrize("api", ["chat", "messages"])
@pytest.mark.parametrize("thinks", [True, False], ids=["opened by the prompt", "begun by the model"])
def test_stop_strings_belong_to_the_answer(
    server: GracefulServer, thinks: bool, api: str, marks: ReasoningMarks, stream: bool
) -> None:
    """Also one that would span the end of the reasoning, and one that begins in it."""
    begun = "" if thinks else marks.begin
    text = f"{begun}{REASONING}{marks.end}The answer is 42. Question: no"
    stop = ["Question:", f"{marks.end}The", f"_call{marks.end[0]}"]
    with chat_template_replaced(server, template_of(marks)), dictated(server, text):
        found = APIS[api](server, stream, thinks=thinks, limit=400, stop=stop)
    assert found == (REASONING, "The answer is 42. ", [], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("demand", ["form", "any", "named", None])
def test_a_limit_inside_the_reasoning_says_length(
    server: GracefulServer, demand: str | None, api: str, stream: bool
) -> None:
    fields: dict[str, Any] = {"schema": SCHEMA} if demand == "form" else {"choice": demand} if demand else {}
    with dictated(server, f"{REASONING}</think>{FORM if demand == 'form' else CALL}"):
        found = APIS[api](server, stream, thinks=True, limit=10, **fields)
    assert found == (REASONING[:10], "", [], "length")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("demand", ["form", "any"])
def test_half_of_the_tokens_are_left_for_a_form(server: GracefulServer, api: str, demand: str) -> None:
    """A model of random weights never ends its reasoning by itself."""
    fields: dict[str, Any] = {"schema": SCHEMA} if demand == "form" else {"choice": demand}
    found = APIS[api](server, False, thinks=True, limit=600, **fields)
    content, calls = found.content.strip(), found.calls
    assert json.loads(content)["a"] in (1, 2) if demand == "form" else calls and calls[0][1]["a"] in (1, 2)
    assert found.finish == "stop" and 0 < len(found.reasoning) <= 300
