"""Tool calls by OpenAI's client, from a model whose template knows tools: SmolLM2's weights with one that does."""

import json

import openai
import pytest

from tests.server.conftest import ENGINE_OPTIONS, run_server
from tests.server.test_tool_parser import LLAMA

TEMPLATE = """{%- if tools %}You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CITY_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY_SCHEMA["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY_SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
IGNORE_EOS = {"ignore_eos": True}
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module", params=[TEMPLATE, LLAMA], ids=["hermes", "llama"])
def client(request):
    with run_server(engine_options=ENGINE_OPTIONS, chat_template=request.param) as up:
        yield openai.OpenAI(base_url=up.url, api_key="none", max_retries=0)


def build_request(**fields):
    return {"model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 80, "temperature": 0, **fields}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_call_full_and_streamed(client, choice):
    (said,) = client.chat.completions.create(**build_request(tool_choice=choice)).choices
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls" and said.message.content is None
    given = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "weather"
    assert given == {} if call.function.name == "time" else given["city"] in ("Paris", "Rome")
    chunks = [c.choices[0] for c in client.chat.completions.create(**build_request(tool_choice=choice), stream=True)]
    (part,) = [t for c in chunks for t in c.delta.tool_calls or ()]
    assert (part.index, part.type, part.function) == (0, "function", part.function)
    assert (part.function.name, part.function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].finish_reason == "tool_calls" and not "".join(c.delta.content or "" for c in chunks)


def test_conversation_continues_after_tool_result(client):
    """The call and its result come back, as the client's own objects."""
    (said,) = client.chat.completions.create(**build_request(tool_choice="required")).choices
    (call,) = said.message.tool_calls
    talk = [*MESSAGES, said.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees."}]
    after = client.chat.completions.create(
        **build_request(messages=talk, tool_choice="none", max_tokens=8), extra_body=IGNORE_EOS
    )
    assert after.choices[0].message.tool_calls is None and after.choices[0].message.content


def test_no_tool_calls_without_tools(client):
    said = client.chat.completions.create(**build_request(tools=openai.NOT_GIVEN, max_tokens=4))
    assert said.choices[0].message.tool_calls is None


def test_unknown_tool_choice_is_rejected(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**build_request(tool_choice={"type": "function", "function": {"name": "x"}}))
