"""Anthropic's own client gets the engine's outputs, full and streamed."""

import inspect
import json
from time import monotonic

import anthropic
import pytest

from retain.server.anthropic.content_blocks import ContentBlocks
from retain.server.anthropic.conversion import to_chat_request
from retain.server.anthropic.protocol import MessagesRequest
from retain.server.anthropic.routes import prepare_message
from retain.server.auth import ANONYMOUS
from retain.server.openai.chat_dialect import ChatDialect
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.prompt_comparison import PromptFingerprints
from retain.server.tool_format import ChatOutput, ParsedToolCall
from tests.server.agent_model import AGENT_TEMPLATE, dictated_answers
from tests.server.conftest import API_KEYS, HTTP, run_server, run_tiny_server
from tests.server.test_tool_calls import HERMES

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [
    {"name": "weather", "description": "of a city", "input_schema": CITY},
    {"name": "time", "input_schema": {"type": "object", "maxProperties": 0}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
EPHEMERAL = {"type": "ephemeral"}
LONG_TEXT = "A page is a number of slots of one head of one layer. " * 8


def make_client(server, **options):
    options = options or {"api_key": "none"}
    return anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), max_retries=0, **options)


@pytest.fixture(scope="module")
def client(server):
    return make_client(server)


@pytest.fixture(scope="module")
def smollm2_client(smollm2_server):
    return make_client(smollm2_server)


@pytest.fixture(scope="module")
def agent_server():
    options = {"kv_memory": "64MiB", "dtype": "float32"}
    with run_server("random:tiny", options, AGENT_TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def agent(agent_server):
    return make_client(agent_server)


def build_request(**fields):
    return {"model": "smollm2", "messages": QUESTION, "max_tokens": 16, "temperature": 0, **fields}


def for_client(**fields):
    """Return the arguments of a request. The client does not know every field of the API, such as the temperature."""
    body = build_request(**fields)
    known = inspect.signature(anthropic.resources.Messages.create).parameters
    return {k: v for k, v in body.items() if k in known} | {"extra_body": {k: body[k] for k in body if k not in known}}


def ask(client, **fields):
    return client.messages.create(**for_client(**fields))


def stream(client, **fields):
    """Return the events of a streamed message, and the message that the client made of them."""
    events = list(ask(client, **fields, stream=True))
    with client.messages.stream(**for_client(**fields)) as parsed:
        return events, parsed.get_final_message()


def dump(message):
    """Return what two equal answers have in common: all but ids, token counts of the cache and times."""
    content = [{k: v for k, v in block.to_dict().items() if k != "id"} for block in message.content]
    return content, message.stop_reason, message.stop_sequence, message.usage.output_tokens


def num_prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_message_equals_chat_completion(smollm2_client, smollm2_server):
    message = ask(smollm2_client, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
    chat = HTTP.post(f"{smollm2_server.url}/chat/completions", json=body).json()
    (block,) = message.content
    assert block.text == chat["choices"][0]["message"]["content"] and "Paris" in block.text
    assert (message.role, message.type, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    assert num_prompt_tokens(message.usage) == chat["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert message.retain[0]["kv"]["bytes_peak"] > 0


def test_extension_fields_reach_the_engine(client):
    extra = {"kv_policy": "sinks:budget=64", "speculate": "ngram", "top_k": 5}
    message = ask(client, max_tokens=4, **extra)
    (stats,) = message.retain
    assert stats["kv"]["policy"].startswith("sinks:") and stats["speculate"] is not None


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}, {"stop_sequences": ["zebra", "Par"]}])
def test_stream_equals_full(client, fields):
    full = ask(client, **fields)
    events, streamed = stream(client, **fields)
    assert dump(streamed) == dump(full)
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-1] == "message_stop"
    assert kinds[-3:-1] == ["content_block_stop", "message_delta"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start, end = events[0].message, events[-2]
    assert start.content == [] and start.stop_reason is None and start.usage.output_tokens == 0
    assert num_prompt_tokens(start.usage) == num_prompt_tokens(end.usage) == num_prompt_tokens(full.usage)
    assert end.retain[0]["kv"]["bytes_peak"] > 0


def test_stop_reasons(smollm2_client):
    stopped = ask(smollm2_client, stop_sequences=["zebra", "Par"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Par")
    assert "Par" not in stopped.content[0].text
    assert ask(smollm2_client, max_tokens=2).stop_reason == "max_tokens"


def test_max_tokens_beyond_the_context_are_lowered(agent):
    """Agents ask for more than the context has, whatever the model."""
    _, message = stream(agent, max_tokens=100_000, ignore_eos=True)
    assert message.stop_reason == "model_context_window_exceeded"
    assert num_prompt_tokens(message.usage) + message.usage.output_tokens in (2048, 2049)


def test_no_output_tokens_compute_the_prompt_only(agent):
    messages = [{"role": "user", "content": f"warm {LONG_TEXT}"}]
    warm = ask(agent, messages=messages, max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    again = ask(agent, messages=messages, max_tokens=1)
    assert again.usage.cache_read_input_tokens == num_prompt_tokens(warm.usage) - 1


def test_json_schema_forces_the_format(agent):
    output = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}
    message = ask(agent, output_config=output)
    assert json.loads(message.content[0].text) in ("yes", "no")


def test_a_last_message_of_the_assistant_is_continued(smollm2_client):
    """The answer is the rest of what the model says alone, with the same prompt and the tokens after it."""
    whole = ask(smollm2_client)
    (block,) = whole.content
    begun = block.text[: block.text.index(" is")]
    _, message = stream(smollm2_client, messages=[*QUESTION, {"role": "assistant", "content": begun}])
    assert begun + message.content[0].text == block.text
    total = num_prompt_tokens(whole.usage) + whole.usage.output_tokens
    assert num_prompt_tokens(message.usage) + message.usage.output_tokens == total


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models_are_listed_in_the_format_of_the_client(client, server):
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("smollm2", "model", "smollm2")
    assert model.created_at.timestamp() == server.service.created
    assert client.models.retrieve("smollm2") == model
    assert HTTP.get(f"{server.url}/models").json()["object"] == "list", "OpenAI's format without the header"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("claude-sonnet-5")
    assert missing.value.type == "not_found_error" and missing.value.request_id


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tool_choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_choice_forces_a_call(client, server, tool_choice, monkeypatch):
    """SmolLM2, because a random model would write blanks into the JSON for ever."""
    service, tokenizer = server.service, server.service.llm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_templates", tokenizer.chat_templates.choose(HERMES))
    monkeypatch.setattr(service.chat_renderer, "dialect", ChatDialect.read(service.llm.tokenizer))
    fields = {"tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 200}
    message = ask(client, **fields)
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use") and call.id.startswith("toolu_")
    assert call.input == {} if call.name == "time" else call.input["city"] in ("Paris", "Rome")
    assert call.name == "weather" or tool_choice["type"] == "any"
    events, streamed = stream(client, **fields)
    assert dump(streamed) == dump(message)
    start = next(e for e in events if e.type == "content_block_start").content_block
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    assert start.input == {} and {d.type for d in deltas} == {"input_json_delta"}
    assert json.loads("".join(d.partial_json for d in deltas)) == call.input


def test_loop_of_call_and_result(agent, agent_server):
    """The client sends its own objects back, with the result; the model then answers in text."""
    renderer, prompts = agent_server.service.chat_renderer, []
    render = renderer.render

    def record(body, key_name):
        chat = render(body, key_name)
        prompts.append(chat.prompt)
        return chat

    with dictated_answers(agent_server, [f"I look.{CALL}", "Sunny."]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderer, "render", record)
        first = ask(agent, tools=TOOLS, max_tokens=200)
        text, call = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "24 degrees"}]}
        failed = {**result, "content": "no such city", "is_error": True}
        turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result, failed]}]
        second = ask(agent, tools=TOOLS, messages=QUESTION + turns, max_tokens=200)
    assert (text.text, call.name, call.input) == ("I look.", "weather", {"city": "Rome"})
    assert first.stop_reason == "tool_use" and second.content[0].text == "Sunny."
    results = "<|tool|>\n24 degrees<|end|>\n<|tool|>\nError: no such city<|end|>\n"
    assert prompts[1] == f"{prompts[0]}I look.{CALL}<|end|>\n{results}<|assistant|>\n"


def test_tool_choice_none_leaves_the_tools_out(agent):
    with_none, without = (
        agent.messages.count_tokens(model="smollm2", messages=QUESTION, **fields).input_tokens
        for fields in ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {})
    )
    assert with_none == without


# ---- thinking --------------------------------------------------------------------------------------------------------


def test_thinking_comes_out_and_goes_in(agent, agent_server):
    answer = f"Rome, I think.</think>I look.{CALL}"
    fields = {"tools": TOOLS, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with dictated_answers(agent_server, [answer] * 3):
        message = ask(agent, **fields)
        events, streamed = stream(agent, **fields)
    thinking, text, call = message.content
    assert [b.type for b in message.content] == ["thinking", "text", "tool_use"]
    assert (thinking.thinking, text.text, call.name) == ("Rome, I think.", "I look.", "weather")
    assert thinking.signature and dump(streamed) == dump(message)
    deltas = [e.delta.type for e in events if e.type == "content_block_delta" and e.index == 0]
    assert deltas[-1] == "signature_delta" and set(deltas[:-1]) == {"thinking_delta"}
    body = build_request(messages=[*QUESTION, {"role": "assistant", "content": [b.to_dict() for b in message.content]}])
    body["messages"] = [*body["messages"], {"role": "user", "content": "And Paris?"}]
    prompt = agent_server.service.chat_renderer.render(to_chat_request(MessagesRequest(**body)), "k").prompt
    assert f"<think>Rome, I think.</think>I look.{CALL}<|end|>\n<|user|>\nAnd Paris?" in prompt


@pytest.mark.parametrize(("kind", "thinks"), [("disabled", False), ("adaptive", True), (None, False)])
def test_template_is_told_whether_to_think(agent_server, kind, thinks):
    fields = {"thinking": {"type": kind}} if kind else {}
    body = to_chat_request(MessagesRequest(**build_request(**fields)))
    prompt = agent_server.service.chat_renderer.render(body, "k").prompt
    assert prompt.endswith("<think>") == thinks


# ---- content blocks --------------------------------------------------------------------------------------------------


def feed_all(outputs):
    """Return the blocks of some outputs without the ids of calls, and the events."""
    content = ContentBlocks()
    events = [event for output in outputs for event in content.feed(output)] + content.close()
    return [{k: v for k, v in block.items() if k not in ("id", "signature")} for block in content.blocks], events


def test_blank_text_makes_no_block_beside_calls():
    call = ParsedToolCall("f", '{"x": 1}')
    outputs = [ChatOutput("", "\n", []), ChatOutput("", " ", [call]), ChatOutput("", "\n", [call])]
    blocks, events = feed_all(outputs)
    assert blocks == [{"type": "tool_use", "name": "f", "input": {"x": 1}}] * 2
    assert [e["index"] for e in events] == [0, 0, 0, 1, 1, 1]
    assert feed_all([ChatOutput("", " ", [])])[0] == [{"type": "text", "text": " "}], "else the answer would be empty"


def test_blanks_inside_of_text_stay():
    blocks, _ = feed_all([ChatOutput("why", "", []), *(ChatOutput("", t, []) for t in ("\n", "a", "\n", "b"))])
    assert blocks == [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "\na\nb"}]


@pytest.mark.parametrize(
    ("arguments", "parsed"), [("[1]", {"value": [1]}), ("{", {"value": "{"}), ('{"a": 1.0}', {"a": 1.0})]
)
def test_arguments_are_an_object(arguments, parsed):
    blocks, events = feed_all([ChatOutput("", "", [ParsedToolCall("f", arguments)])])
    assert blocks[0]["input"] == parsed == json.loads(events[1]["delta"]["partial_json"])


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_breakpoint_pins_what_precedes_it(agent, agent_server):
    """The system prompt up to its breakpoint is written and pinned; the next conversation reads it."""
    system = [{"type": "text", "text": LONG_TEXT, "cache_control": EPHEMERAL}, {"type": "text", "text": "Be brief."}]
    first = ask(agent, system=system, max_tokens=2)
    prefix_cache = agent_server.service.llm.cache.prefix_cache
    begun = len(f"<|system|>\n{LONG_TEXT}")
    assert first.usage.cache_creation_input_tokens + first.usage.cache_read_input_tokens == begun
    assert len(prefix_cache.tree.pins) > 0
    prefix_cache.tree.evict(prefix_cache.tree.num_evictable_pages)
    other = [{"role": "user", "content": "Another question"}]
    second = ask(agent, system=system, messages=other, max_tokens=2)
    assert second.usage.cache_read_input_tokens >= begun and second.usage.cache_creation_input_tokens == 0
    assert num_prompt_tokens(second.usage) > second.usage.cache_read_input_tokens
    prefix_cache.tree.unpin_all()


def pin_of(agent_server, **fields):
    """Return the pins of a request as the seconds and the text that they keep."""
    service = agent_server.service
    prepared = prepare_message(service, MessagesRequest(**build_request(**fields)), ANONYMOUS, PromptFingerprints())
    (request,) = prepared.requests
    return {pin.seconds: service.llm.tokenizer.decode(request.prompt[: pin.num_tokens]) for pin in prepared.pins}


def test_pins_end_at_breakpoints(agent_server):
    tools = [TOOLS[0] | {"cache_control": EPHEMERAL | {"ttl": "1h"}}, TOOLS[1]]
    content = [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}]
    assert pin_of(agent_server, tools=tools)[3600].endswith("false}}}\n")
    content[0]["cache_control"] = EPHEMERAL
    messages = [{"role": "user", "content": content}]
    pins = pin_of(agent_server, tools=tools, messages=messages)
    assert pins[300].endswith("<|user|>\nfirst") and len(pins[3600]) < len(pins[300])
    assert pin_of(agent_server, messages=messages, cache_control=EPHEMERAL)[300].endswith("<|assistant|>\n")
    hour = {"cache_control": EPHEMERAL | {"ttl": "1h"}}
    assert list(pin_of(agent_server, messages=messages, **hour)) == [3600], "the later one lives longer"


def test_pins_are_bounded_by_the_limit(secured_server):
    client = make_client(secured_server, api_key=API_KEYS["ann"])
    system = [{"type": "text", "text": LONG_TEXT, "cache_control": EPHEMERAL | {"ttl": "1h"}}]
    usage = ask(client, system=system, max_tokens=1).usage
    assert usage.cache_creation_input_tokens > len(LONG_TEXT)
    prefix_cache = secured_server.service.llm.cache.prefix_cache
    assert max(prefix_cache.tree.pins._until.values()) <= monotonic() + 60
    prefix_cache.tree.unpin_all()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS},
        {"system": "Count what is written, too.", "cache_control": EPHEMERAL},
        {"thinking": {"type": "adaptive"}, "messages": [*QUESTION, *QUESTION]},
    ],
)
def test_count_tokens_equals_usage(agent, fields):
    counted = agent.messages.count_tokens(model="smollm2", **{"messages": QUESTION, **fields}).input_tokens
    assert counted == num_prompt_tokens(ask(agent, **fields, max_tokens=1).usage)


# ---- conversion ------------------------------------------------------------------------------------------------------


def test_conversation_becomes_a_chat_completion():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1"}, {"type": "text", "text": "d"}],
        },
        {"role": "system", "content": "e"},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": messages, "stop_sequences": ["x"], "pin": 3}
    chat = to_chat_request(MessagesRequest(**body))
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    expected = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "\n\n", "b")]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "d"}]},
        {"role": "system", "content": [{"type": "text", "text": "e"}]},
    ]
    assert chat == ChatCompletionRequest(
        model="m", messages=expected, max_completion_tokens=5, stop=["x"], pin=3, **{"stream": chat.stream}
    )


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_choice_of_an_unknown_tool_is_refused(agent_server):
    request = build_request(tools=TOOLS, tool_choice={"type": "tool", "name": "x"})
    response = HTTP.post(f"{agent_server.url}/messages", json=request)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("tool_choice names an unknown tool")


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens"])
def test_deep_nesting_is_refused(agent_server, path):
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [*QUESTION, {"role": "assistant", "content": [call]}, *QUESTION]
    text = json.dumps({"model": "smollm2", "messages": messages} | ({"max_tokens": 1} if path == "/messages" else {}))
    nested = text.replace('"input": {}', '"input": ' + '{"x": ' * 1000 + "0" + "}" * 1000)
    response = HTTP.post(f"{agent_server.url}{path}", content=nested, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_errors_raised_before_the_route(secured_server):
    def post(path, key, **options):
        response = HTTP.post(f"{secured_server.url}/messages{path}", headers={"x-api-key": key}, **options)
        return response.status_code, response.json()["type"], response.json()["error"]["type"]

    ann = API_KEYS["ann"]
    assert post("", "wrong", json={}) == (401, "error", "authentication_error")
    assert post("", ann, content=b"x" * 100_001) == (413, "error", "request_too_large")
    assert post("", ann, content=(b" " * 10_000 for _ in range(20))) == (413, "error", "request_too_large")
    assert post("", ann, content=b"{") == (400, "error", "invalid_request_error")
    assert post("/x", ann, json={}) == (404, "error", "not_found_error")
    assert post("", ann, json=build_request(model="x")) == (404, "error", "not_found_error")
    assert HTTP.get(f"{secured_server.url}/messages", headers={"x-api-key": ann}).json()["type"] == "error"


def test_client_raises_its_own_errors(secured_server):
    with pytest.raises(anthropic.AuthenticationError):
        ask(make_client(secured_server, api_key="wrong"))
    by_header, by_token = (
        make_client(secured_server, **key) for key in ({"api_key": API_KEYS["ann"]}, {"auth_token": API_KEYS["ann"]})
    )
    with pytest.raises(anthropic.NotFoundError):
        ask(by_token, model="x")
    admission = secured_server.service.admission
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "max_in_flight", 0)
        with pytest.raises(anthropic.RateLimitError) as limited:
            ask(by_header)
    assert limited.value.type == "rate_limit_error" and int(limited.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("streamed", [False, True])
def test_failing_step_is_an_api_error(monkeypatch, streamed):
    with run_tiny_server() as server:
        engine = server.service.llm.engine
        monkeypatch.setattr(engine.runner, "forward", lambda batch: 1 / 0)
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(ask(make_client(server), stream=streamed))
    assert failed.value.type == "api_error"
