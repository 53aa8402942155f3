"""Tool calls by OpenAI's client, from a model whose template knows tools: SmolLM2's weights with one that does."""

import json

import openai
import pytest

from tests.server.conftest import ENGINE, serving
from tests.server.test_calls import LLAMA

TEMPLATE = """{%- if tools %}You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
PLACE["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 0}}},
]
GOES_ON = {"ignore_eos": True}
TALK = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module", params=[TEMPLATE, LLAMA], ids=["hermes", "llama"])
def client(request):
    with serving(engine=ENGINE, template=request.param) as up:
        yield openai.OpenAI(base_url=up.url, api_key="none", max_retries=0)


def asked(**more):
    return {"model": "smollm2", "messages": TALK, "tools": TOOLS, "max_tokens": 80, "temperature": 0, **more}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_whole_and_as_a_stream(client, choice):
    (said,) = client.chat.completions.create(**asked(tool_choice=choice)).choices
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls" and said.message.content is None
    given = json.loads(call.function.arguments)
    if choice != "required":
        assert call.function.name == "weather"
    assert given == {} if call.function.name == "time" else given["city"] in ("Paris", "Rome")
    chunks = [c.choices[0] for c in client.chat.completions.create(**asked(tool_choice=choice), stream=True)]
    (part,) = [t for c in chunks for t in c.delta.tool_calls or ()]
    assert (part.index, part.type, part.function) == (0, "function", part.function)
    assert (part.function.name, part.function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].finish_reason == "tool_calls" and not "".join(c.delta.content or "" for c in chunks)


def test_a_conversation_goes_on_behind_a_call(client):
    """The call and its result come back, as the client's own objects."""
    (said,) = client.chat.completions.create(**asked(tool_choice="required")).choices
    (call,) = said.message.tool_calls
    talk = [*TALK, said.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees."}]
    after = client.chat.completions.create(**asked(messages=talk, tool_choice="none", max_tokens=8), extra_body=GOES_ON)
    assert after.choices[0].message.tool_calls is None and after.choices[0].message.content


def test_without_tools_nothing_is_heard(client):
    said = client.chat.completions.create(**asked(tools=openai.NOT_GIVEN, max_tokens=4))
    assert said.choices[0].message.tool_calls is None


def test_a_tool_that_is_not_there_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**asked(tool_choice={"type": "function", "function": {"name": "x"}}))
