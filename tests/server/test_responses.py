"""The Responses API by OpenAI's own client: answers, streams, tools, stored conversations, errors."""

import json
from contextlib import contextmanager

import openai
import pytest
from pydantic import BaseModel

from retain.server.auth import ApiKeys
from retain.server.config import Limits
from retain.server.openai.errors import APIError
from tests.server.conftest import API_KEYS, HTTP, chat_template_replaced, run_tiny_server
from tests.server.test_tool_calls import CITY_SCHEMA, HERMES

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
THINKING = "{% for m in messages %}{{ m.content }}</think>{% endfor %}<think>\n"  # every answer begins with reasoning
LOGPROBS = "message.output_text.logprobs"


def connect(server, key="none"):
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return connect(server)


@pytest.fixture(scope="module")
def smollm2_client(smollm2_server):
    return connect(smollm2_server)


@pytest.fixture
def quick_client(quick_smollm2_server):
    return connect(quick_smollm2_server)


@pytest.fixture(scope="module")
def tiny_client(tiny_server):
    return connect(tiny_server)


def build_request(input=QUESTION, **fields):
    return {"model": "smollm2", "input": input, "max_output_tokens": 12, "temperature": 0, **fields}


@contextmanager
def recorded_prompts(server):
    """Record the token ids of the prompts that a server prepares."""
    prompts, prepare = [], server.service.prepare_chat_request

    def record(body, key):
        prepared = prepare(body, key)
        prompts.append(prepared[0].prompt)
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.service, "prepare_chat_request", record)
        yield prompts


def test_response_equals_chat_completion(smollm2_client):
    response = smollm2_client.responses.create(**build_request(instructions="Be brief.", metadata={"a": "b"}, user="u"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = smollm2_client.chat.completions.create(
        model="smollm2", messages=messages, max_completion_tokens=12, temperature=0
    )
    assert response.output_text == chat.choices[0].message.content and "Paris" in response.output_text
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.retain["kv"]["bytes_peak"] > 0
    repeated = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "max_output_tokens": 12}
    assert {name: getattr(response, name) for name in repeated} == repeated
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


def test_stream_equals_full(smollm2_client):
    request = build_request(include=[LOGPROBS], top_logprobs=2)
    full = smollm2_client.responses.create(**request)
    with smollm2_client.responses.stream(**request) as stream:
        events = list(stream)
        final = stream.get_final_response()
    (text,), (streamed,) = full.output[0].content, final.output[0].content
    assert streamed.text == text.text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert len([e for e in events if e.type == "response.output_text.delta"]) > 3
    assert final.usage.output_tokens == full.usage.output_tokens
    tokens = [p.token for p in text.logprobs]
    assert tokens == [p.token for p in streamed.logprobs] and "".join(tokens) == text.text
    assert tokens == [p.token for e in events if e.type == "response.output_text.delta" for p in e.logprobs]
    assert all(len(p.top_logprobs) == 2 and p.top_logprobs[0].logprob >= p.logprob for p in text.logprobs)


def test_incomplete_at_max_output_tokens(client):
    full = client.responses.create(**build_request(max_output_tokens=3))
    assert full.status == "incomplete" and full.incomplete_details.reason == "max_output_tokens"
    assert full.output[0].status == "incomplete" and full.usage.output_tokens == 3
    last = list(client.responses.create(**build_request(max_output_tokens=3), stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == full.output_text


def test_extension_fields(client):
    fields = {"kv_policy": "ring:window=64", "speculate": "ngram", "cache_salt": "mine", "top_k": 1, "ignore_eos": True}
    response = client.responses.create(**build_request(temperature=1, extra_body=fields))
    assert response.retain["kv"]["policy"].startswith("ring") and response.retain["speculate"] is not None
    assert response.usage.output_tokens == 12


def test_reasoning_is_streamed(server, client):
    with chat_template_replaced(server, THINKING):
        events = list(client.responses.create(**build_request(max_output_tokens=6), stream=True))
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    (reasoning,) = events[-1].response.output
    assert reasoning.type == "reasoning" and reasoning.content[0].text == "".join(deltas) != ""
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 6


class City(BaseModel):
    name: str
    country: str


@pytest.mark.slow
def test_parse_a_schema(quick_client):
    response = quick_client.responses.parse(**build_request(max_output_tokens=60), text_format=City)
    assert isinstance(response.output_parsed, City) and response.text.format.type == "json_schema"
    with quick_client.responses.stream(**build_request(max_output_tokens=60), text_format=City) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    any_object = quick_client.responses.create(
        **build_request(max_output_tokens=4, text={"format": {"type": "json_object"}})
    )
    assert any_object.output_text.lstrip().startswith("{")


TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY_SCHEMA, "strict": True}


@pytest.mark.slow
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "name": "weather"}])
def test_call_and_result(quick_smollm2_server, quick_client, tool_choice):
    """The call is streamed as it is returned; its result continues the conversation, stored or sent back."""
    ask = {"role": "user", "content": "What is the weather in Rome?"}
    request = build_request([ask], tools=[TOOL], tool_choice=tool_choice, max_output_tokens=80)
    with chat_template_replaced(quick_smollm2_server, HERMES):
        first = quick_client.responses.create(**request)
        (call,) = first.output
        assert call.type == "function_call" and call.name == "weather" and first.output_text == ""
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        with quick_client.responses.stream(**request) as stream:
            events = list(stream)
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 24 degrees."}
        after = build_request([result], tools=[TOOL], tool_choice="none", max_output_tokens=8)
        with recorded_prompts(quick_smollm2_server) as prompts:
            stored = quick_client.responses.create(**after, previous_response_id=first.id)
            sent = quick_client.responses.create(**{**after, "input": [ask, call, result]})
        assert stored.output_text == sent.output_text != "" and prompts[0] == prompts[1]
        text = quick_smollm2_server.service.llm.tokenizer.decode(prompts[0])
        assert "<tool_call>" in text and "Sunny, 24 degrees." in text


def test_previous_response_equals_whole_history(tiny_server, tiny_client):
    """The prompt's tokens are the same, so the prefix cache finds the first turn."""
    first_input = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "One "}, {"type": "input_text", "text": "two"}]},
    ]
    with recorded_prompts(tiny_server) as prompts:
        first = tiny_client.responses.create(**build_request(first_input))
        second = tiny_client.responses.create(**build_request("More", previous_response_id=first.id))
        history = [*first_input, *first.output, {"role": "user", "content": "More"}]
        tiny_client.responses.create(**build_request(history, store=False))
        third = tiny_client.responses.create(**build_request("Stop", previous_response_id=second.id))
        history += [*second.output, {"type": "message", "role": "user", "content": "Stop"}]
        tiny_client.responses.create(**build_request(history, store=False))
    assert prompts[1] == prompts[2] and prompts[3] == prompts[4] and len(prompts[3]) > len(prompts[1])
    page_size = tiny_server.service.llm.config.page_size
    for before, after in ((first, second), (second, third)):
        assert after.usage.input_tokens_details.cached_tokens > before.usage.input_tokens - page_size
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)


def test_instructions_are_not_inherited(tiny_server, tiny_client):
    with recorded_prompts(tiny_server) as prompts:
        first = tiny_client.responses.create(**build_request("One", instructions="Shout."))
        tiny_client.responses.create(**build_request("Two", previous_response_id=first.id))
        tiny_client.responses.create(**build_request("Two", instructions="Sing.", previous_response_id=first.id))
    texts = [tiny_server.service.llm.tokenizer.decode(prompt) for prompt in prompts]
    assert "Shout." in texts[0] and texts[1].startswith("user: One") and texts[2].startswith("system: Sing.\nuser: One")


def test_stored_response_is_found_and_deleted(tiny_client):
    first = tiny_client.responses.create(**build_request("One"))
    second = tiny_client.responses.create(**build_request("Two", previous_response_id=first.id))
    assert tiny_client.responses.retrieve(second.id) == second
    items = tiny_client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items[0].content[0].text == "One" and items[1].id == first.output[0].id
    newest = tiny_client.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == items[2].id and newest.has_more
    following = tiny_client.responses.input_items.list(second.id, limit=5, after=items[2].id)
    assert [item.id for item in following.data] == [items[1].id, items[0].id] and not following.has_more
    tiny_client.responses.delete(first.id)
    for call in (tiny_client.responses.retrieve, tiny_client.responses.delete, tiny_client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    third = tiny_client.responses.create(**build_request("Three", previous_response_id=second.id))
    assert len(tiny_client.responses.input_items.list(third.id).data) == 5, "the second response keeps the first"


def test_store_false_keeps_nothing(tiny_client):
    response = tiny_client.responses.create(**build_request(store=False))
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        tiny_client.responses.retrieve(response.id)


def test_streamed_response_is_stored_before_its_last_event(tiny_client):
    for event in tiny_client.responses.create(**build_request(), stream=True):
        if event.type in ("response.completed", "response.incomplete"):
            assert tiny_client.responses.retrieve(event.response.id).output == event.response.output


def test_store_is_bounded_and_keys_are_apart():
    limits = Limits(max_stored_bytes=20_000)
    with run_tiny_server(limits=limits, api_keys=ApiKeys(API_KEYS)) as server:
        ann, bob = (connect(server, key) for key in API_KEYS.values())
        first = ann.responses.create(**build_request("x" * 50))
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as raised:
            bob.responses.create(**build_request("y", previous_response_id=first.id))
        assert raised.value.code == "previous_response_not_found"
        ids = [bob.responses.create(**build_request("y" * 500, max_output_tokens=1)).id for _ in range(20)]
        found = []
        for response_id in ids:
            try:
                found.append(bob.responses.retrieve(response_id).id)
            except openai.NotFoundError:
                assert not found, "the oldest go first"
        assert 2 < len(found) < 15 and found == ids[-len(found) :]
        assert ann.responses.retrieve(first.id).id == first.id, "a key below its share loses nothing to another"


def test_prompt_that_is_too_long(tiny_server, tiny_client):
    """Agents shorten a conversation for this code: in a stream they find it in the last event only."""
    words = "maximum context length is 9 tokens, reduce the length of the messages"
    overflow = APIError(400, words, "messages", "context_length_exceeded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_server.service, "prepare_chat_request", lambda *_: (_ for _ in ()).throw(overflow))
        with pytest.raises(openai.BadRequestError) as raised:
            tiny_client.responses.create(**build_request())
        events = list(tiny_client.responses.create(**build_request(), stream=True))
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
    assert [event.type for event in events] == ["response.created", "response.in_progress", "error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
    assert failed.error.message == words.replace("messages", "input")
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]


def test_errors_of_the_other_routes(tiny_server, tiny_client):
    with pytest.raises(openai.NotFoundError):
        tiny_client.responses.create(**build_request(model="/etc/passwd"))
    response = tiny_client.responses.create(**build_request())
    root = f"{tiny_server.url}/responses/{response.id}"
    for path, param in (
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?after=x", "after"),
    ):
        error = HTTP.get(root + path)
        assert error.status_code == 400 and error.json()["error"]["param"] == param
