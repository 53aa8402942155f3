"""An answer that continues a message: it is the rest of the answer that the model would give alone."""

from __future__ import annotations

import pytest

from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers
from tests.server.conftest import HTTP, chat_template_replaced
from tests.server.test_tool_calls import HERMES, TOOLS

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def post(server, path, status=200, **body):
    response = HTTP.post(f"{server.url}{path}", json={"model": "smollm2", "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response.json()


def begin_answer(text):
    return [*QUESTION, {"role": "assistant", "content": text}]


def test_a_chat_completion_continues_an_answer(smollm2_server):
    limit = {"max_tokens": 16}
    whole = post(smollm2_server, "/chat/completions", messages=QUESTION, **limit)["choices"][0]["message"]["content"]
    begun = whole[: whole.index(" capital")]
    answer = post(smollm2_server, "/chat/completions", messages=begin_answer(begun), **CONTINUED, **limit)
    assert begun + answer["choices"][0]["message"]["content"] == whole


def test_an_open_turn_is_the_beginning_of_an_answer(server):
    """Behind an empty message of the assistant the prompt is the one without it."""
    begun = post(server, "/chat/completions/render", messages=begin_answer(""), **CONTINUED)
    assert begun["token_ids"] == post(server, "/chat/completions/render", messages=QUESTION)["token_ids"]
    closed = post(server, "/chat/completions/render", messages=QUESTION, add_generation_prompt=False)
    assert begun["token_ids"][: len(closed["token_ids"])] == closed["token_ids"]
    assert len(closed["token_ids"]) < len(begun["token_ids"])


def test_tokenize_counts_the_open_turn(server):
    body = {"model": "smollm2", "messages": begin_answer("This is"), **CONTINUED}
    tokens = HTTP.post(f"{server.url.removesuffix('/v1')}/tokenize", json=body).json()["tokens"]
    assert tokens == post(server, "/chat/completions/render", **body)["token_ids"]
    assert server.service.llm.tokenizer.decode(tokens).endswith("assistant\nThis is")


def test_what_cannot_be_continued_is_refused(server):
    for fields in (
        {"continue_final_message": True},  # an answer cannot begin as well
        CONTINUED | {"response_format": {"type": "json_object"}},
    ):
        error = post(server, "/chat/completions", 400, messages=begin_answer("{"), **fields)["error"]
        assert "continue" in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("template", "begun", "rest", "expected"),
    [
        (HERMES, '<tool_call>{"name": ', '"time", "arguments": {}}</tool_call>', {"content": None, "name": "time"}),
        (HERMES, '{"cities": [', '"Rome"]}', {"content": '"Rome"]}'}),
        (AGENT_TEMPLATE, "<think>Is it", " Rome?</think>Yes.", {"content": "Yes.", "reasoning_content": " Rome?"}),
    ],
)
def test_the_answer_is_parsed_from_the_state_of_the_prompt(server, template, begun, rest, expected):
    with chat_template_replaced(server, template), dictated_answers(server, [rest]):
        body = {"messages": begin_answer(begun), "tools": TOOLS, "max_tokens": 60, **CONTINUED}
        message = post(server, "/chat/completions", **body)["choices"][0]["message"]
    calls = message.get("tool_calls") or [{"function": {}}]
    assert {name: {**message, **calls[0]["function"]}.get(name) for name in expected} == expected
