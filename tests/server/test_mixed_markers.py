"""Answers of any markers in any order: their parts do not depend on the pieces in which the text arrives."""

from __future__ import annotations

import random

import pytest

from retain.processing.reasoning import KNOWN_MARKS, ReasoningMarks
from retain.server.openai.chat_output import ReasoningParser, TaggedAnswerParser, ToolParser
from retain.server.tool_format import AnswerParser, ChatOutput, ToolFormat
from retain.server.tool_formats import load_tool_format, tool_format_names

SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}}}
WORDS = (
    '{"name": "f", "arguments": {"a": 1}}', "f", "{", "}", "[", "]", '"', "\\", "\n", " ", "<", "</", "{}", "f(a=1)",
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>",
    "call:f{a:1}", '<|"|>', "[ARGS]", "f\n```json\n", "\n```",
)  # fmt: skip
MARKS = [marks for marks in KNOWN_MARKS if not marks.repeats]


def create_parser(tool_format: ToolFormat, marks: ReasoningMarks, is_open: bool) -> AnswerParser:
    whole = tool_format.create_parser(SCHEMAS, "")
    return whole or TaggedAnswerParser(ToolParser(tool_format, SCHEMAS), ReasoningParser(is_open, [marks]))


def draw_text(rng: random.Random, markers: list[str]) -> str:
    return "".join(rng.choice(markers if rng.random() < 0.5 else WORDS) for _ in range(rng.randint(1, 12)))


def join(pieces: list[ChatOutput]) -> ChatOutput:
    calls = [call for piece in pieces for call in piece.tool_calls]
    return ChatOutput("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), calls)


def test_a_marker_that_begins_like_a_value_is_a_marker() -> None:
    """Also where its first character comes alone."""
    call = '{"name": "f", "arguments": {"a": 1}}'
    for text in (f"[TOOL_CALLS][TOOL_CALLS]{call}", f"[TOOL_CALLS]x[TOOL_CALLS][{call}]"):
        parser = ToolParser(load_tool_format("mistral")(), SCHEMAS)
        calls = [found for c in text for found in parser.feed(c)[1]] + parser.close()[1]
        assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.begin.strip("<>[|]"))
@pytest.mark.parametrize("name", tool_format_names())
def test_the_parts_of_an_answer_do_not_depend_on_its_pieces(name: str, marks: ReasoningMarks) -> None:
    rng = random.Random(name)
    tool_format = load_tool_format(name)()
    markers = [*filter(None, (*tool_format.markers, *tool_format.bare_begins, *marks.texts))]
    for _ in range(250):
        text = rng.choice(["", marks.answer_begin, f"{marks.end}\n\n{marks.answer_begin}\n"]) + draw_text(rng, markers)
        is_open = rng.random() < 0.5
        parser = create_parser(tool_format, marks, is_open)
        pieces = []
        begin = 0
        while begin < len(text):
            end = begin + rng.choice([1, 1, 2, 5])
            pieces.append(parser.feed(text[begin:end], finished=False))
            begin = end
        pieces.append(parser.feed("", finished=True))
        joined = join(pieces)
        assert joined == create_parser(tool_format, marks, is_open).feed(text, finished=True), text
