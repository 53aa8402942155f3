"""Prompts that end inside of their last message: they are transformers', and the answer's parser begins behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_output import (
    ChatOutputParser,
    ReasoningParser,
    TaggedAnswerParser,
    ToolParser,
    continue_answer,
)
from retain.server.tool_format import ChatOutput
from retain.server.tool_formats import detect_tool_format
from tests.helpers.tokenizers import open_tokenizer
from tests.server.agent_model import AGENT_TEMPLATE
from tests.server.test_tool_calls import HERMES
from tests.server.test_tool_parser import LLAMA, MISTRAL

TRIMMED = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
EMPTY_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.lstrip('\n') }}<|end|>\n{% endfor %}"
)
REASONING_MOVED = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|{{ m.role }}|>{{ c }}<|end|>{% endfor %}"
)
TEMPLATES = {
    "agent": AGENT_TEMPLATE,
    "hermes": HERMES,
    "smollm2": open_tokenizer("smollm2").chat_template or "",
    "trimmed": TRIMMED,
    "empty_reasoning": EMPTY_REASONING,
    "reasoning_moved": REASONING_MOVED,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CONTENTS = [
    "The best answer is (",
    "{",
    "",
    " ",
    "  a\n",
    "a  ",
    "<think>\nI wonder",
    "<think>x</think>\n\nSo ",
    "ünï\u2028",
]


def transformers_prompt(template: str, messages: list[dict], tools: list[dict] | None) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second to import

    try:
        (prompt,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, continue_final_message=True, bos_token="<bos>"
        )
    except ValueError:
        return None
    return prompt


def our_prompt(template: str, messages: list[dict], tools: list[dict] | None) -> str | None:
    core = open_tokenizer("gemma3")._core
    tokenizer = Tokenizer(
        core, Path("x"), chat_templates={"default": template}, special_tokens_map={"bos_token": "<bos>"}
    )
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, continue_final_message=True)
    except ValueError as error:
        assert "\n" not in str(error)
        return None


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("content", CONTENTS)
def test_unfinished_prompts_are_those_of_transformers(template: str, content: str) -> None:
    source = TEMPLATES[template]
    messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": content}]
    tools = TOOLS if "tools" in source else None
    prompt = our_prompt(source, messages, tools)
    assert prompt == transformers_prompt(source, messages, tools)
    if prompt is not None:
        assert prompt.rstrip().endswith(content.strip())


def test_the_end_of_a_message_is_the_beginning_of_its_turn() -> None:
    """Behind an empty message the turn is open: the prompt is the one that begins an answer."""
    tokenizer = open_tokenizer("smollm2")
    question = [{"role": "user", "content": "Which?"}]
    begun = tokenizer.apply_chat_template(question)
    answer = [*question, {"role": "assistant", "content": ""}]
    assert tokenizer.apply_chat_template(answer, continue_final_message=True) == begun
    answer[-1]["content"] = "This"
    assert tokenizer.apply_chat_template(answer, continue_final_message=True) == f"{begun}This"


def test_a_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(ValueError, match="no text"):
        open_tokenizer("smollm2").apply_chat_template([{"role": "assistant"}], continue_final_message=True)


# ---- the parser ------------------------------------------------------------------------------------------------------

PIECES = [
    *("<think>", "</think>", "<th", "ink>", "a", "\n", " ", "<tool_call>", "</tool_call>", "<tool", "_call>"),
    *('{"name": "f", ', '"arguments": {}, "parameters": {}}', "{", "[TOOL_CALLS]"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8)
CALL_TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, None: None}


def create_parser(template: str | None, reasoning: bool, begun: str = "") -> ChatOutputParser:
    tool_format = detect_tool_format(template) if template else None

    def create() -> TaggedAnswerParser:
        tool_parser = ToolParser(tool_format, {"f"}) if tool_format else None
        return TaggedAnswerParser(tool_parser, ReasoningParser(False) if reasoning else None)

    return continue_answer(create, begun)


def feed_all(parser: ChatOutputParser, pieces: list[str]) -> ChatOutput:
    outputs = [parser.feed(piece, finished=False) for piece in pieces] + [parser.feed("", finished=True)]
    calls = [call for output in outputs for call in output.tool_calls]
    return ChatOutput("".join(o.reasoning for o in outputs), "".join(o.content for o in outputs), calls)


@given(TEXTS, TEXTS, st.sampled_from(list(CALL_TEMPLATES)), st.booleans())
def test_an_answer_is_the_rest_of_the_message(
    begun: list[str], rest: list[str], template: str | None, reasoning: bool
) -> None:
    """The parts of a message are those of its beginning, which the client has, and those of the answer."""
    template = CALL_TEMPLATES[template]
    whole = feed_all(create_parser(template, reasoning), [*begun, *rest])
    shown = feed_all(create_parser(template, reasoning), begun)
    answers = []
    for pieces in (rest, list("".join(rest))):
        parser = create_parser(template, reasoning, "".join(begun))
        answers.append(feed_all(parser, pieces))
    answer = answers[0]
    assert answers == [answer, answer]
    assert whole.reasoning.endswith(answer.reasoning) and whole.content.endswith(answer.content)
    assert whole.tool_calls[len(whole.tool_calls) - len(answer.tool_calls) :] == answer.tool_calls
    begins = [whole.content.startswith(shown.content), whole.reasoning.startswith(shown.reasoning)]
    if all(begins) and shown.tool_calls == whole.tool_calls[: len(shown.tool_calls)]:
        assert whole.content == shown.content + answer.content
        assert whole.reasoning == shown.reasoning + answer.reasoning


@pytest.mark.parametrize(
    ("begun", "rest", "expected"),
    [
        ("{", '"a": 1}', ChatOutput("", '"a": 1}', [])),
        ("<think>I won", "der</think>So", ChatOutput("der", "So", [])),
        ("<think>I wonder</thi", "nk>So", ChatOutput("", "So", [])),
        ("The <tool", "box>", ChatOutput("", "box>", [])),
    ],
)
def test_the_parser_begins_in_the_state_of_the_prompt(begun: str, rest: str, expected: ChatOutput) -> None:
    parser = create_parser(HERMES, True, begun)
    assert feed_all(parser, [rest]) == expected


@pytest.mark.parametrize(("template", "key"), [(HERMES, "arguments"), (LLAMA, "parameters")])
def test_a_call_that_the_prompt_begins_is_a_call(template: str, key: str) -> None:
    tool_format = detect_tool_format(template)
    assert tool_format
    parser = create_parser(template, False, f'{tool_format.begin}{{"name": "f", ')
    output = feed_all(parser, [f'"{key}": {{"x": 1}}}}{tool_format.end}'])
    assert (output.content, [(call.name, call.arguments) for call in output.tool_calls]) == ("", [("f", '{"x": 1}')])
