"""Tool calls by OpenAI's client, from SmolLM2 with chat templates that support tools."""

import json

import openai
import pytest

from tests.server.conftest import chat_template_replaced
from tests.server.test_tool_parser import LLAMA

HERMES = """{%- if tools %}You may call: {% for t in tools %}{{ t | tojson }}{% endfor %}
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
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama"])
def client(request, quick_smollm2_server):
    """A client of SmolLM2, which gets another chat template."""
    with chat_template_replaced(quick_smollm2_server, request.param):
        yield openai.OpenAI(base_url=quick_smollm2_server.url, api_key="none", max_retries=0)


def build_request(**fields):
    return {"model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 80, "temperature": 0, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_call_full_and_streamed(client, tool_choice):
    request = build_request(tool_choice=tool_choice)
    (choice,) = client.chat.completions.create(**request).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    arguments = json.loads(call.function.arguments)
    if tool_choice != "required":
        assert call.function.name == "weather"
    assert arguments == {} if call.function.name == "time" else arguments["city"] in ("Paris", "Rome")
    chunks = [c.choices[0] for c in client.chat.completions.create(**request, stream=True)]
    (part,) = [t for c in chunks for t in c.delta.tool_calls or ()]
    assert (part.index, part.type, part.function) == (0, "function", part.function)
    assert (part.function.name, part.function.arguments) == (call.function.name, call.function.arguments)
    assert chunks[-1].finish_reason == "tool_calls" and not "".join(c.delta.content or "" for c in chunks)


@pytest.mark.slow
def test_conversation_continues_after_tool_result(client):
    """The client sends the call back as its own object, with the tool's result."""
    (choice,) = client.chat.completions.create(**build_request(tool_choice="required")).choices
    (call,) = choice.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees."}
    request = build_request(messages=[*MESSAGES, choice.message, result], tool_choice="none", max_tokens=8)
    after = client.chat.completions.create(**request, extra_body={"ignore_eos": True})
    assert after.choices[0].message.tool_calls is None and after.choices[0].message.content


def test_no_tool_calls_without_tools(client):
    response = client.chat.completions.create(**build_request(tools=openai.NOT_GIVEN, max_tokens=4))
    assert response.choices[0].message.tool_calls is None


def test_unknown_tool_choice_is_rejected(client):
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**build_request(tool_choice={"type": "function", "function": {"name": "x"}}))
