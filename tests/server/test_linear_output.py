"""What turns generated text into an answer does work in proportion to the text, whatever a model writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retain.engine.request import FinishReason, Logprob
from retain.server.anthropic.content_blocks import ContentBlocks
from retain.server.openai.chat_output import ChatOutputParser, ReasoningParser, TaggedAnswerParser, ToolParser
from retain.server.openai.choice_builders import CompletionChoiceBuilder
from retain.server.openai.responses.client_tools import expand_tools
from retain.server.openai.responses.output import OutputItems
from retain.server.request_group import OutputDelta
from retain.server.tool_format import ChatOutput
from retain.server.tool_formats import load_tool_format, tool_format_names
from tests.helpers.counted_work import CountedText, assert_linear, cut_into_pieces
from tests.helpers.tokenizers import open_tokenizer

FORMATS = {name: load_tool_format(name)() for name in tool_format_names()}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXTS: dict[str, Callable[[int], str]] = {  # of about n characters, by what they repeat
    "plain": lambda n: "x" * n,
    "blank": lambda n: " " * n,
    "lines": lambda n: "\n" * n,
    "an endless call": lambda n: "<tool_call>" + "[" * n,
    "an endless list of calls": lambda n: "[TOOL_CALLS] [" + '{"name": "f"},' * (n // 14),
    "calls": lambda n: CALL * (n // len(CALL)),
    "empty calls": lambda n: "<tool_call></tool_call>" * (n // 23),
    "begin tags": lambda n: "<tool_call>" * (n // 11),
    "begun tags": lambda n: "<tool_cal" * (n // 9),
    "begun end tags": lambda n: "<tool_call>" + "</tool_cal" * (n // 10),
    "long reasoning": lambda n: "<think>" + "</thin" * (n // 6),
    "lines after reasoning": lambda n: "<think></think>" + "\n" * n,
    "tags of reasoning": lambda n: "<think></think>" * (n // 15),
}
CHANNEL_TEXTS: dict[str, Callable[[int], str]] = {
    "an endless header": lambda n: "<|channel|>" + "x" * n,
    "headers": lambda n: "<|start|>assistant<|channel|>final" * (n // 34),
    "begun markers": lambda n: "<|mess" * (n // 6),
    "messages": lambda n: "<|channel|>final<|message|>x<|end|>" * (n // 35),
    "an endless message to a tool": lambda n: "<|channel|>commentary to=f<|message|>" + "[" * n,
    "messages to a tool": lambda n: "<|channel|>commentary to=f<|message|>{}<|call|>" * (n // 47),
    "begun recipients": lambda n: " to" * (n // 3),
}

# What begins a call of each kind of format, and what hostile texts repeat behind it, beside what all do.
COMMON_BODIES = ("{begin}", "{end}", " ", "\"'", "\\", "[{{", "[{{}}]", "1")
HEADS = {
    "hermes": ("{begin}", ("</tool_cal",)),
    "llama3_json": ('{{"name": "f", "parameters": ', ('{{"name"', "; {{")),
    "deepseek_v3": ("{begin}function<｜tool▁sep｜>f\n```json\n", ("```", "<｜tool▁sep｜>")),
    "ministral3": ("{begin}f[ARGS]", ("[ARGS]", "[CALL_ID]")),
    "qwen3_coder": ("{begin}<function=f><parameter=a>", ("<parameter=a>", "<parameter=a></parameter>", "</parameter>")),
    "glm45": (
        "{begin}f<arg_key>a</arg_key><arg_value>",
        ("<arg_key>", "</arg_value>", "<arg_key>a</arg_key><arg_value>"),
    ),
    "gemma4": ("{begin}call:f{{a:", ('<|"|>', "{{a:", "{{a:1}},a:")),
    "lfm2": ("{begin}[f(a=", ("f(a=1), ", "\\\\'")),
}
HOSTILE = [(name, body) for name, (_, bodies) in HEADS.items() for body in (*COMMON_BODIES, *bodies)]


@pytest.mark.parametrize("size", [3, 10**6], ids=["in tokens", "whole"])
@pytest.mark.parametrize(("format_name", "body"), HOSTILE)
def test_work_on_a_hostile_call_is_linear_in_the_text(format_name: str, body: str, size: int) -> None:
    tool_format = FORMATS[format_name]
    begin = tool_format.begins[0]
    end = (*tool_format.ends, "")[0]
    repeated = body.format(begin=begin, end=end)

    def prepare(n: int) -> Callable[[], object]:
        text = HEADS[format_name][0].format(begin=begin) + repeated * (n // max(1, len(repeated))) + end
        parser = ChatOutputParser(TaggedAnswerParser(ToolParser(tool_format, {"f": {}})))
        pieces = [*map(CountedText, cut_into_pieces(text, size)), CountedText("")]
        return lambda: [parser.feed(piece, finished=not piece) for piece in pieces]

    assert_linear(prepare, 400)


@pytest.mark.parametrize("size", [3, 10**6], ids=["in tokens", "whole"])
@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        *(("hermes", name) for name in TEXTS),
        ("mistral", "an endless list of calls"),
        ("llama3_json", "plain"),
        *(("harmony", name) for name in ("plain", "blank", "lines", *CHANNEL_TEXTS)),
    ],
)
def test_work_of_the_parsers_is_linear_in_the_text(format_name: str, name: str, size: int) -> None:
    def prepare(n: int) -> Callable[[], object]:
        tool_format = FORMATS[format_name]
        whole = tool_format.create_parser({"f"}, "")
        tagged = TaggedAnswerParser(ToolParser(tool_format, {"f"}), ReasoningParser(False))
        parser = ChatOutputParser(whole or tagged)
        text = (TEXTS | CHANNEL_TEXTS)[name](n)
        pieces = [*map(CountedText, cut_into_pieces(text, size)), CountedText("")]
        return lambda: [parser.feed(piece, finished=not piece) for piece in pieces]

    assert_linear(prepare, 500)


@pytest.mark.parametrize("kind", ["reasoning", "content"])
@pytest.mark.parametrize("name", ["plain", "blank"])
@pytest.mark.parametrize("create", [ContentBlocks, lambda: OutputItems(expand_tools([]))], ids=["blocks", "items"])
def test_work_of_streamed_parts_is_linear_in_the_text(create: Callable[[], Any], name: str, kind: str) -> None:
    def prepare(n: int) -> Callable[[], object]:
        parts: Any = create()
        add = parts.feed if isinstance(parts, ContentBlocks) else lambda output: parts.add(output, ())
        empty = ChatOutput("", "", [])
        outputs = [empty._replace(**{kind: CountedText(piece)}) for piece in cut_into_pieces(TEXTS[name](n), 1)]
        return lambda: [add(output) for output in outputs]

    assert_linear(prepare, 300)


def test_work_to_locate_tokens_that_a_stop_string_holds_back_is_linear() -> None:
    tokenizer = open_tokenizer("smollm2")
    token = tokenizer.encode("#")[0]

    def prepare(n: int) -> Callable[[], object]:
        builder = CompletionChoiceBuilder(tokenizer, 0, True, [token])
        held = [OutputDelta(0, "", [token], [Logprob(token, -1.0)]) for _ in range(n)]
        deltas = [*held, OutputDelta(0, "#" * n, finish_reason=FinishReason.LENGTH)]
        return lambda: [builder.build_chunks(delta) for delta in deltas]

    assert_linear(prepare, 200)
