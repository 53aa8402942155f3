"""Tool calls: what is said and what is called, however an answer is cut into pieces; and a grammar that makes calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.processing.chat_template import ChatTemplate
from retain.processing.grammar import grammar_from_lark
from retain.server.openai.tool_parser import ToolParser, detect_tool_format

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
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA}
MODEL_OUTPUTS = {
    "hermes": 'I look. <tool_call>\n{"name": "find", "arguments": {"q": "</b> é"}}\n</tool_call> and '
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "mistral": "I look. [TOOL_CALLS] "
    '[{"name": "find", "arguments": {"q": "</b> é"}}, {"name": "now", "arguments": {}}]',
    "llama": '[{"name": "find", "parameters": {"q": "</b> é"}}, {"name": "now", "parameters": {}}]',
}
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
    ear, said, calls = ToolParser(detect_tool_format(TEMPLATES[template_name]), {"find", "now"}), "", []
    for piece in chunks:
        text, more = ear.feed(piece)
        said, calls = said + text, calls + more
    text, more = ear.close()
    return said + text, [(c.name, json.loads(c.arguments)) for c in calls + more]


@pytest.mark.parametrize("kind", TEMPLATES)
@given(st.data())
def test_tool_calls_do_not_depend_on_chunking(template_name, data):
    text = MODEL_OUTPUTS[template_name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said, calls = parse_chunks(template_name, pieces)
    assert calls == [("find", {"q": "</b> é"}), ("now", {})]
    assert said == {"hermes": "I look.  and ", "mistral": "I look. ", "llama": ""}[template_name]


@pytest.mark.parametrize("kind", TEMPLATES)
@given(st.text(st.sampled_from('<tool_cal>/[TOL_CS]{}"name :,argumentsé\n'), max_size=60), st.integers(0, 60))
def test_text_without_tool_calls_is_unchanged(template_name, text, cut):
    """Nothing of an answer is lost, and it does not matter where it is cut."""
    said, calls = parse_chunks(template_name, [text[:cut], text[cut:]])
    assert (said, calls) == parse_chunks(template_name, [text])
    if not calls:
        assert said == text


def test_template_without_tools_is_rejected():
    assert detect_tool_format("{{ messages[0].content }}") is None
    with pytest.raises(ValueError, match="knows no tools"):
        ChatTemplate("{{ messages[0].content }}", {}).render([{"content": "x"}], True, [FIND_TOOL])
    shown = ChatTemplate(HERMES, {}).render(
        [{"role": "user", "content": "x"}], True, [{"type": "function", "function": FIND_TOOL}]
    )
    assert '"find"' in shown and ChatTemplate(HERMES, {}).can_use_tools


@pytest.mark.parametrize("kind", TEMPLATES)
def test_grammar_generates_one_tool_call(template_name, compiler):
    """Drawn at random from what it allows: a call of one of the tools, as this way of writing reads it."""
    import torch

    form = compiler.form(
        grammar_from_lark(detect_tool_format(TEMPLATES[template_name]).build_grammar([FIND_TOOL, {"name": "now"}]))
    )
    rng, ids = torch.Generator().manual_seed(3), []
    for step in range(400):
        logits = torch.randn(1, compiler.vocab, generator=rng)
        for token, piece in CLOSING_TOKEN_WEIGHTS.items() if step > 20 else ():
            logits[0, token] += 50 * piece
        form.allow(logits, [])
        ids.append(int(logits.argmax()))
        if ids[-1] in compiler.tokenizer.stop_ids or form.push(ids[-1]):
            break
    text = compiler.tokenizer.decode(ids)
    said, calls = parse_chunks(template_name, [text])
    assert not said.strip() and len(calls) == 1 and calls[0][0] in ("find", "now")


CLOSING_TOKEN_WEIGHTS: dict[int, float] = {}


@pytest.fixture(scope="module")
def compiler():
    from retain.models.resolve import resolve_model
    from retain.processing import Tokenizer
    from retain.processing.grammar import GrammarCompiler

    tokenizer = Tokenizer.open(resolve_model("smollm2"))
    for text in ('"', '"}', "}", "}}", "]", "</tool_call>", "<"):
        for token in tokenizer.encode(text, add_special_tokens=False)[:1]:
            CLOSING_TOKEN_WEIGHTS[token] = 1.0
    found = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    return found
