"""Calls of earlier turns reach a chat template in the shape that it takes, and are read back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retain.processing.chat_template import ChatTemplate
from retain.server.openai.chat_output import ToolParser
from retain.server.tool_formats import detect_tool_format
from tests.helpers.dialects import SHOWN, TOOL_LIST

ARGUMENTS = {"text": 'é \\ "q" <x>\n', "count": 2, "items": ["a", True, None]}
SCHEMAS: dict[str, Any] = {
    "find": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": p}} for name, p in SCHEMAS.items()]
LOOP = "{% for m in messages %}<{{ m.role }}>"
TEXT = "{% if m.content %}{{ m.content }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"
TAGS = (
    "{% for k, v in f.arguments.items() %}<parameter={{ k }}>{{ '\n' if lines }}"
    "{{ v if v is string else v | tojson }}{{ '\n' if lines }}</parameter>\n{% endfor %}</function>\n"
)
PAIRS = (
    "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}"
)
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
CHECK_ID = "{% if c.id | length != 9 %}{{ raise_exception('Ids have a length of 9') }}{% endif %}"
MARKS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
# Templates that take histories as published ones do: which fields they read, and what they refuse.
TEMPLATES = {
    "hermes": LOOP + TEXT + CALLS + f"<tool_call>\n{OBJECT}\n</tool_call>" + END,
    "llama, one call": SHOWN["llama3_json"]
    + LOOP
    + TEXT
    + "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    + CALLS
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + END,
    "mistral, ids": LOOP + TEXT + CALLS + CHECK_ID + f"[TOOL_CALLS] [{OBJECT}]" + END,
    "ministral 3": LOOP
    + "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}{{ b.text or "
    + "'[THINK]' + b.thinking + '[/THINK]' }}{% endfor %}{% endif %}"
    + CALLS
    + CHECK_ID
    + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
    + END,
    "qwen3 coder": "{% set lines = true %}"
    + LOOP
    + TEXT
    + CALLS
    + "<tool_call>\n<function={{ f.name }}>\n"
    + TAGS
    + "</tool_call>"
    + END,
    "seed": LOOP + TEXT + CALLS + "<seed:tool_call>\n<function={{ f.name }}>\n" + TAGS + "</seed:tool_call>" + END,
    "glm": LOOP + TEXT + CALLS + "<tool_call>{{ f.name }}\n" + PAIRS + "</tool_call>" + END,
    "deepseek v3, texts": LOOP
    + TEXT
    + CALLS
    + "{{ '"
    + MARKS[0]
    + "function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments + '\\n```"
    + MARKS[1]
    + "' }}"
    + END,
    "deepseek v3.1, texts": LOOP
    + TEXT
    + CALLS
    + "{{ '"
    + MARKS[0]
    + "' + f.name + '<｜tool▁sep｜>' + f.arguments + '"
    + MARKS[1]
    + "' }}"
    + END,
    "deepseek v3.1, objects": LOOP
    + TEXT
    + CALLS
    + MARKS[0]
    + "{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
    + MARKS[1]
    + END,
    "command": LOOP
    + TEXT
    + CALLS
    + '<|START_ACTION|>[{"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}]<|END_ACTION|>'
    + END,
    "lfm2, no calls": SHOWN["lfm2"] + LOOP + TEXT + "{% endfor %}",
    "granite, no calls": SHOWN["granite"] + LOOP + TEXT + "{% endfor %}",
    "phi 4 mini, no calls": "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tools %}<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}{% endfor %}",
}


def convert(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_a_history_are_read_back_from_its_prompt(name: str) -> None:
    source = TEMPLATES[name] if name.startswith("phi") else TOOL_LIST + " " + TEMPLATES[name]
    if name.startswith("ministral"):
        source += "{# [/THINK] #}"
    tool_format = detect_tool_format(source)
    assert tool_format
    calls = [convert("call_of_any_length", "find", ARGUMENTS), convert("another", "now", {})]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "R"} for call in calls]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls}
    messages, tools = tool_format.place_tools(
        tool_format.fit_messages([{"role": "user", "content": "Q"}, answer, *results]), TOOLS
    )
    text = ChatTemplate(source, {}).render(messages, True, tools or None)
    assert '"find"' in text
    assert ("[THINK]hm[/THINK]" in text) == name.startswith("ministral")
    parser = ToolParser(tool_format, SCHEMAS)
    turn = text.partition("<assistant>")[2]
    content, found = parser.feed(turn)
    rest, more = parser.close()
    assert [(c.name, json.loads(c.arguments)) for c in found + more] == [("find", ARGUMENTS), ("now", {})]
    assert "I look." in content and (content + rest).count("R") == 2
