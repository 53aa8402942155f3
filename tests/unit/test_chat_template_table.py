"""Chat templates in the shapes of real families render as transformers renders them, or refuse where it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from retain.processing.chat_template import ChatTemplate, ChatTemplates
from tests.helpers.tokenizers import build_unigram_core

pytestmark = pytest.mark.slow  # importing transformers takes seconds

FOLDER = Path(__file__).parents[1] / "helpers/chat_templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}

SYSTEM = {"role": "system", "content": "  Be brief. /think\n"}
USER = {"role": "user", "content": "What is <b>2&2</b> in 東京? "}
ANSWER = {"role": "assistant", "content": " Four. "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}
NEXT = {"role": "user", "content": "And\n3?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather. ",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city, é"},
                "days": {"type": ["integer", "null"]},
                "unit": {"enum": ["c", "f"]},
                "more": {"type": "object", "properties": {"deep": {"type": "number"}}},
            },
            "required": ["city"],
        },
    },
}
NOTHING = {"type": "object", "properties": {}}
CLOCK = {"type": "function", "function": {"name": "now", "description": "Time", "parameters": NOTHING}}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "東京", "days": 2}},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TWO_CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "call67890"}]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"sky": "clear"}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}
REASONED = {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}
REASONED_CALL = {"role": "assistant", "content": None, "thinking": "a call", "tool_calls": [CALL]}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one question": {"messages": [USER]},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "system and turns": {"messages": [SYSTEM, USER, ANSWER, NEXT]},
    "thoughts": {"messages": [USER, THOUGHT, NEXT, THOUGHT], "add_generation_prompt": False},
    "reasoning": {"messages": [USER, REASONED, NEXT, REASONED], "add_generation_prompt": False},
    "reasoning by another name": {"messages": [USER, {**ANSWER, "reasoning": "2 + 2"}, NEXT]},
    "two users": {"messages": [USER, NEXT]},
    "system in the middle": {"messages": [USER, ANSWER, SYSTEM, NEXT]},
    "unknown role": {"messages": [USER, {"role": "critic", "content": "Hm."}]},
    "without content": {"messages": [USER, {"role": "assistant"}, NEXT]},
    "null content": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": None}, NEXT]},
    "parts": {"messages": [PARTS]},
    "parts of a system message": {"messages": [{**PARTS, "role": "system"}, USER]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, CLOCK]},
    "no tools": {"messages": [USER], "tools": []},
    "a call": {"messages": [USER, CALLING, RESULT], "tools": [WEATHER]},
    "a call and an answer": {"messages": [SYSTEM, USER, CALLING, RESULT, ANSWER, NEXT], "tools": [WEATHER, CLOCK]},
    "a call without tools": {"messages": [USER, CALLING, RESULT, ANSWER, NEXT]},
    "two calls": {"messages": [USER, TWO_CALLS, RESULT, {**RESULT, "content": "8 °C"}], "tools": [WEATHER]},
    "a reasoned call": {"messages": [USER, REASONED_CALL, RESULT], "tools": [WEATHER]},
    "a result without a call": {"messages": [USER, RESULT], "tools": [WEATHER]},
    "thinking": {"messages": [USER], "enable_thinking": True, "thinking": True},
    "no thinking": {"messages": [USER, ANSWER, NEXT], "enable_thinking": False},
    "variables": {"messages": [SYSTEM, USER], "reasoning_effort": "high", "date_string": "1 May 2026", "level": 3},
    "documents": {"messages": [USER], "documents": [{"doc_id": 1, "title": "Math", "text": "Two and two are four."}]},
    "controls": {"messages": [USER], "controls": {"length": "short"}, "model_identity": "You are é."},
    "tools of other names": {"messages": [USER], "custom_tools": [WEATHER], "builtin_tools": ["code_interpreter", "x"]},
    "other special tokens": {"messages": [USER, ANSWER], "bos_token": "[B]", "eos_token": "[E]"},
}  # fmt: skip


@cache
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=build_unigram_core(), **SPECIAL_TOKENS)


def render(template: ChatTemplate, source: str, conversation: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return what transformers renders from the source and this package from the template; None where one refuses."""
    given: dict[str, Any] = {"add_generation_prompt": True, "tools": None, **conversation}
    messages = given.pop("messages")
    try:
        expected = reference().apply_chat_template(messages, chat_template=source, tokenize=False, **given)
    except Exception:  # of any kind
        expected = None
    add_generation_prompt, tools = given.pop("add_generation_prompt"), given.pop("tools")
    try:
        return expected, template.render(messages, add_generation_prompt, tools, given)
    except ValueError as error:
        assert "\n" not in str(error)
        return expected, None


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_does(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    num_rendered = 0
    for label, conversation in CONVERSATIONS.items():
        expected, found = render(template, TEMPLATES[name], conversation)
        if conversation.get("tools") and not template.can_use_tools:
            assert found is None, label  # transformers ignores the tools
        else:
            assert found == expected, label
            num_rendered += expected is not None
    assert num_rendered >= 4 or name in ("private_namespace", "undefined_role")


def test_the_table_covers_what_templates_use() -> None:
    text = "\n".join(TEMPLATES.values())
    used = ("{% generation %}", "break %}", "continue %}", "macro ", "namespace(", "strftime_now", "raise_exception(")
    used += ("tojson(indent=4)", "separators=", "sort_keys", "ensure_ascii", "loop.index0", "loop.previtem", "|items")
    used += ("cycler(", "joiner(", "dict(", "documents", "enable_thinking", "reasoning_content", "date_string")
    assert len(TEMPLATES) >= 40 and len(CONVERSATIONS) >= 25
    assert not [name for name in used if name not in text]


@pytest.mark.parametrize("tools", [None, [WEATHER]])
def test_named_templates_are_chosen_as_transformers_does(tools: list[dict[str, Any]] | None) -> None:
    """And a name given chooses one for all conversations."""
    tool_use, default = TEMPLATES["command_r_tool_use"], TEMPLATES["command_r"]
    theirs = PreTrainedTokenizerFast(tokenizer_object=build_unigram_core(), **SPECIAL_TOKENS)
    sources = {"default": default, "tool_use": tool_use, "rag": TEMPLATES["documents"]}
    for names, given in ((("default", "tool_use"), None), (("tool_use", "rag"), None), (tuple(sources), "rag")):
        named = {name: sources[name] for name in names}
        theirs.chat_template = named
        ours = ChatTemplates(named, SPECIAL_TOKENS).choose(name=given)
        messages = [SYSTEM, USER]
        try:
            expected = theirs.apply_chat_template(messages, tools, chat_template=given, tokenize=False)
        except ValueError:
            expected = None
        if expected is None or (given and tools):  # no default, or a template that would ignore the tools
            with pytest.raises(ValueError, match=r"none of the model's chat templates|does not support tools"):
                ours.render(messages, False, tools, {})
        else:
            assert ours.render(messages, False, tools, {}) == expected
