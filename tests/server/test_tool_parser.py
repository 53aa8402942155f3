"""The tool parser finds calls however the output is cut into pieces, and grammars generate calls that it parses."""

import json

import orjson
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from retain.models.resolve import resolve_model
from retain.processing.chat_template import ChatTemplate
from retain.processing.grammar import GrammarCompiler, grammar_from_json_schema, grammar_from_lark
from retain.processing.tokenizer import Tokenizer
from retain.server import tool_formats
from retain.server.openai.chat_output import ToolParser
from retain.server.tool_formats import detect_tool_format, tool_format_names

HERMES = """{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>
Answer in <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}"""
MISTRAL = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{% endif %}"
)
LLAMA = (
    '{% if tools %}Respond {"name": function, "parameters": arguments}{{ tools }}{% endif %}{{ messages[0].content }}'
)
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA}
MODEL_OUTPUTS = {
    "hermes": 'I look. <tool_call>\n{"name": "find", "arguments": {"q": "</b> é"}}\n</tool_call> and '
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "mistral": "I look. [TOOL_CALLS] "
    '[{"name": "find", "arguments": {"q": "</b> é"}}, {"name": "now", "arguments": {}}]',
    "llama3_json": '[{"name": "find", "parameters": {"q": "</b> é"}}, {"name": "now", "parameters": {}}]',
}
CONTENTS = {"hermes": "I look.  and ", "mistral": "I look. ", "llama3_json": ""}
FIND_TOOL = {
    "name": "find",
    "parameters": {
        "type": "object",
        "properties": {"q": {"type": "string"}},
        "required": ["q"],
        "additionalProperties": False,
    },
}


def parse_chunks(template_name, chunks):
    parser = ToolParser(detect_tool_format(TEMPLATES[template_name]), {"find", "now"})
    content, calls = "", []
    for text, more in [*map(parser.feed, chunks), parser.close()]:
        content, calls = content + text, calls + more
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("template_name", TEMPLATES)
@given(st.data())
def test_tool_calls_do_not_depend_on_chunking(template_name, data):
    text = MODEL_OUTPUTS[template_name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = parse_chunks(template_name, chunks)
    assert calls == [("find", {"q": "</b> é"}), ("now", {})] and content == CONTENTS[template_name]


@pytest.mark.parametrize("template_name", TEMPLATES)
@given(st.text(st.sampled_from('<tool_cal>/[TOL_CS]{}"name :,argumentsé\n'), max_size=60), st.integers(0, 60))
@example("<tool_call>", 0)
@example("a[TOOL_CALLS]", 3)
def test_text_without_tool_calls_is_unchanged(template_name, text, cut):
    content, calls = parse_chunks(template_name, [text[:cut], text[cut:]])
    assert (content, calls) == parse_chunks(template_name, [text])
    if not calls:
        assert content == text


NEW_FORMAT = """
from dataclasses import dataclass

from retain.server.tool_format import JsonToolFormat


@dataclass(frozen=True)
class Format(JsonToolFormat):
    begin: str = "<call>"
    end: str = "</call>"

    @classmethod
    def from_template(cls, template):
        return cls() if "<call>" in template else None
"""


def test_a_new_format_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "zephyr.py").write_text(NEW_FORMAT)
    monkeypatch.setattr(tool_formats, "__path__", [*tool_formats.__path__, str(tmp_path)])
    assert "zephyr" in tool_format_names()
    parser = ToolParser(detect_tool_format("{{ tools }}<call></call>"), {"f"})
    content, (call,) = parser.feed('a<call>{"name": "f", "arguments": {"x": 1}}</call>b')
    assert (content, call.name, call.arguments) == ("ab", "f", '{"x": 1}')
    assert not parser.close()[1]


def test_template_without_tools_is_rejected():
    assert detect_tool_format("{{ messages[0].content }}") is None
    with pytest.raises(ValueError, match="tools"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{"content": "x"}], True, [FIND_TOOL])
    messages, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": FIND_TOOL}]
    assert '"find"' in ChatTemplate(HERMES, {}).render(messages, True, tools)
    assert ChatTemplate(HERMES, {}).can_use_tools


@pytest.fixture(scope="module")
def compiler():
    tokenizer = Tokenizer.open(resolve_model("smollm2"))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def closing_tokens(compiler):
    """First tokens of what closes a call. Random output is steered to them, or strings would never end."""
    endings = ('"', '"}', "}", "}}", "]", "</tool_call>", "<")
    return [compiler.tokenizer.encode(text, add_special_tokens=False)[0] for text in endings]


@pytest.mark.parametrize("template_name", TEMPLATES)
def test_grammar_generates_one_tool_call(template_name, compiler, closing_tokens):
    """Random tokens that the grammar allows are a call of one of the tools, as the parser reads it."""
    tool_format = detect_tool_format(TEMPLATES[template_name])
    state = compiler.compile(grammar_from_lark(tool_format.build_grammar([FIND_TOOL, {"name": "now"}])))
    generator, ids = torch.Generator().manual_seed(3), []
    for step in range(400):
        logits = torch.randn(1, compiler.vocab_size, generator=generator)
        if step > 20:
            logits[0, closing_tokens] += 50
        state.mask_logits(logits, [])
        ids.append(int(logits.argmax()))
        assert state.accept_token(ids[-1])
        if ids[-1] in compiler.tokenizer.stop_token_ids or state.is_complete:
            break
    content, calls = parse_chunks(template_name, [compiler.tokenizer.decode(ids)])
    assert not content.strip() and len(calls) == 1 and calls[0][0] in ("find", "now")


def unit_of(*values):
    return {"enum": list(values)}


UNIT = {"unit": {"$ref": "#/$defs/Unit"}}
CLOSED = {"type": "object", "additionalProperties": False}
REFERRING = {  # to their own root, each in another way; `Unit` is another thing in each
    "defs": {**CLOSED, "$defs": {"Unit": unit_of("c", "f")}, "properties": UNIT, "required": ["unit"]},
    "same_name": {**CLOSED, "$defs": {"Unit": unit_of("x")}, "properties": UNIT, "required": ["unit"]},
    "root": {**CLOSED, "properties": {"next": {"$ref": "#"}}},
    "id": {**CLOSED, "$id": "http://x/y", "$defs": {"Unit": unit_of("i")}, "properties": UNIT},
    "anchor": {**CLOSED, "$defs": {"Unit": {"$anchor": "u", **unit_of("a")}}, "properties": {"unit": {"$ref": "#u"}}},
    "definitions": {
        **CLOSED,
        "definitions": {"Unit": unit_of("d"), "Two": {"$ref": "#/definitions/Unit"}},
        "properties": {"unit": {"$ref": "#/definitions/Two"}},
    },
    "const": {**CLOSED, "properties": {"unit": {"const": "#/$defs/Unit"}}},
    "referred": {"$ref": "#/$defs/All", "$defs": {"All": {**CLOSED, "properties": UNIT}, "Unit": unit_of("r")}},
}
ARGUMENTS = [{}, {"next": {"next": {}}}, {"next": 1}, *({"unit": u} for u in [*"cfxiadr", "#/$defs/Unit"])]


def accepts(compiler, grammar, text):
    state = compiler.compile(grammar)
    ids = compiler.tokenizer.encode(text, add_special_tokens=False)
    return all(map(state.accept_token, [*ids, *([] if state.is_complete else compiler.tokenizer.stop_token_ids)]))


@pytest.mark.parametrize("template_name", TEMPLATES)
def test_a_call_accepts_the_arguments_that_the_tools_own_schema_does(template_name, compiler):
    """Whatever its references: they are to its own root, also beside other tools."""
    tool_format = detect_tool_format(TEMPLATES[template_name])
    tools = [{"name": name, "parameters": parameters} for name, parameters in REFERRING.items()]
    grammar = grammar_from_lark(tool_format.build_grammar(tools))
    for name, parameters in REFERRING.items():
        for arguments in ARGUMENTS if template_name == "hermes" or name == "defs" else ARGUMENTS[:4]:
            text = json.dumps({"name": name, tool_format.arguments_key: arguments})
            call = tool_format.begin + (f"[{text}]" if tool_format.is_list else text) + tool_format.end
            alone = accepts(compiler, grammar_from_json_schema(parameters), json.dumps(arguments))
            assert accepts(compiler, grammar, call) == alone, call
    assert accepts(compiler, grammar, call.replace("referred", "unknown")) is False


def test_a_call_that_no_arguments_fit_is_refused(compiler):
    dead = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(ValueError, match="no value matches"):
        detect_tool_format(HERMES).build_grammar([FIND_TOOL, {"name": "f", "parameters": dead}])


@pytest.mark.parametrize("arguments", [r'{"q": "\ud800 é"}', r'"{\"q\": \"\ud800 é\"}"'])
def test_arguments_with_half_a_character_can_be_sent(arguments):
    """A model may write half of a surrogate pair as an escape, which is JSON but no Unicode text."""
    parser = ToolParser(detect_tool_format(HERMES), {"find"})
    text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
    (call,) = parser.feed(text)[1]
    assert orjson.loads(orjson.dumps(call.arguments)) == call.arguments
    assert json.loads(call.arguments)["q"].endswith(" é")


@pytest.mark.parametrize("step", [1, 100])
@pytest.mark.parametrize("end", ["", "</", "</tool_call", "</tool_call>"])
def test_a_text_may_end_inside_of_the_marker_behind_a_call(end, step):
    parser = ToolParser(detect_tool_format(HERMES), {"now"})
    text = f'<tool_call>{{"name": "now", "arguments": {{}}}}\n{end}'
    found = [*(parser.feed(text[i : i + step]) for i in range(0, len(text), step)), parser.close()]
    assert "".join(content for content, _ in found).strip() == ""
    assert [call.name for _, calls in found for call in calls] == ["now"]
