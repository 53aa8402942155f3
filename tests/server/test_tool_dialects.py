"""Each dialect's calls are read as they were written, whole and in pieces, and what its grammar demands is one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retain.models import list_families
from retain.processing.chat_template import ChatTemplates
from retain.processing.grammar import GrammarCompiler, GrammarState, grammar_from_lark
from retain.processing.tokenizer import Tokenizer
from retain.server.openai.chat_dialect import _explain_missing_format
from retain.server.openai.chat_output import TaggedAnswerParser, ToolParser
from retain.server.text_arguments import find_types, read_text_value
from retain.server.tool_format import AnswerParser
from retain.server.tool_formats import detect_tool_format, find_call_marker, load_tool_format, tool_format_names
from tests.helpers.dialects import (
    ANSWERS,
    DIALECTS,
    FIND,
    HARMONY_MARKS,
    NOT_READ,
    NOW,
    SHOWN,
    TOOL_LIST,
    TOOLS,
    Answer,
    Call,
    Calls,
    Dialect,
    find,
    iter_texts,
)
from tests.helpers.tokenizers import open_byte_tokenizer

SPECIAL_TOKENS = (  # of published tokenizers
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|tool_call>", "<tool_call|>", '<|"|>', "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>", "<|/tool_call|>", "<seed:tool_call>", "</seed:tool_call>"),
    *("<function_calls>", "</function_calls>", *HARMONY_MARKS),
)
DEMANDED = [  # with and without special tokens; gpt-oss has none of its marks as texts
    (name, has_special_tokens)
    for name, dialect in DIALECTS.items()
    for has_special_tokens in (False, True)
    if dialect.is_demanded and (has_special_tokens or name != "gpt-oss")
]
SCHEMAS: dict[str, Any] = {tool["name"]: tool["parameters"] for tool in TOOLS}


def is_known(calls: Calls) -> bool:
    return all(call.name in SCHEMAS for call in calls)


@cache
def format_of(dialect_name: str) -> Any:
    tool_format = load_tool_format(DIALECTS[dialect_name].format)
    return tool_format(line_break="") if dialect_name == "glm 4.7" else tool_format()  # type: ignore[call-arg]


def create_parser(dialect_name: str, schemas: Any) -> AnswerParser:
    tool_format = format_of(dialect_name)
    return tool_format.create_parser(schemas, "") or TaggedAnswerParser(ToolParser(tool_format, schemas))


def parse(dialect_name: str, pieces: Sequence[str], schemas: Any = None) -> tuple[str, list[Call]]:
    parser = create_parser(dialect_name, schemas or SCHEMAS)
    outputs = [parser.feed(piece, finished=i == len(pieces)) for i, piece in enumerate([*pieces, ""])]
    calls = [Call(call.name, json.loads(call.arguments)) for output in outputs for call in output.tool_calls]
    return "".join(output.content for output in outputs), calls


def expressible(dialect: Dialect, answer: Answer) -> list[str | Calls]:
    """Return an answer without calls that a dialect cannot write."""
    return [part for part in answer if isinstance(part, str) or all(map(dialect.can_express, part))]


@cache
def compiler_of(format_name: str, has_special_tokens: bool) -> GrammarCompiler:
    """Return the compiler of a tokenizer of bytes, in which the marks of a format are special tokens or texts."""
    tool_format = load_tool_format(format_name)()
    marks = tuple(dict.fromkeys(mark for mark in SPECIAL_TOKENS if mark in "".join(tool_format.markers)))
    tokenizer = open_byte_tokenizer(marks if has_special_tokens else ())
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def find_special_tokens(dialect_name: str, compiler: GrammarCompiler) -> list[str]:
    return [*compiler.tokenizer.find_special_tokens(format_of(dialect_name).markers)]


def demand(dialect_name: str, tools: Sequence[Any], has_special_tokens: bool) -> GrammarState:
    """Return the start of the grammar of a call of one of these tools."""
    compiler = compiler_of(DIALECTS[dialect_name].format, has_special_tokens)
    lark = format_of(dialect_name).build_grammar(tools, find_special_tokens(dialect_name, compiler))
    return compiler.compile(grammar_from_lark(lark))


def accepts(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    state = state.copy()
    return all(map(state.accept_token, [*ids, *([] if state.is_complete else tokenizer.stop_token_ids)]))


def test_each_format_has_a_dialect() -> None:
    assert {dialect.format for dialect in DIALECTS.values()} == set(tool_format_names()) == set(SHOWN)


# Families whose published chat templates have no tools, or whose format nobody here reads.
WITHOUT_CALLS = {
    *("gpt2", "gpt_neox", "gptj", "mpt", "opt", "olmo2", "gemma3", "gemma3_text"),
    *("glm4", "granite_swa", "granitemoeshared", "muse_glimmer", "muse_glimmer_text"),
}


def test_each_family_has_a_format_of_calls_or_is_known_to_have_none() -> None:
    named = {family for name in tool_format_names() for family in load_tool_format(name).families}
    assert named.isdisjoint(WITHOUT_CALLS)
    assert named | WITHOUT_CALLS == set(list_families())


@pytest.mark.parametrize("name", SHOWN)
def test_each_format_is_found_by_the_template_that_shows_it(name: str) -> None:
    assert type(detect_tool_format(TOOL_LIST + " " + SHOWN[name])) is load_tool_format(name)
    assert detect_tool_format(SHOWN[name].replace("tools", "")) is None


@pytest.mark.parametrize("name", NOT_READ)
def test_a_dialect_that_nobody_reads_is_taken_for_no_other(name: str) -> None:
    """Its template is refused with tools, in one line that names what it shows."""
    shown, marker = NOT_READ[name]
    template = TOOL_LIST + " " + shown
    assert detect_tool_format(template) is None
    assert find_call_marker(template) == marker
    why = _explain_missing_format(ChatTemplates({"default": template}, {}))
    assert (marker or "no marker") in why and "\n" not in why


@pytest.mark.parametrize("dialect_name", DIALECTS)
def test_answers_are_read_as_they_were_written(dialect_name: str) -> None:
    """Whole and by character. What a dialect cannot express is left out: the table says what that is."""
    dialect = DIALECTS[dialect_name]
    for label, answer in ANSWERS.items():
        expressed = expressible(dialect, answer)
        text = dialect.write(expressed)
        expected = dialect.expect(expressed, is_known)
        assert parse(dialect_name, [text]) == expected, label
        assert parse(dialect_name, list(text)) == expected, label


@pytest.mark.parametrize("dialect_name", DIALECTS)
def test_a_text_that_no_value_can_have_makes_no_other_call(dialect_name: str) -> None:
    """It ends the value early: what is read is content, or a call with a part of the text."""
    dialect = DIALECTS[dialect_name]
    for mark in dialect.inexpressible:
        _, calls = parse(dialect_name, [dialect.write([find(text=f"a {mark} b")])])
        assert all(call.name == "find" and call.arguments.get("text", "a").startswith("a") for call in calls)


@pytest.mark.parametrize("dialect_name", DIALECTS)
@settings(max_examples=60)
@given(st.data())
def test_calls_do_not_depend_on_the_pieces_of_the_text(dialect_name: str, data: st.DataObject) -> None:
    dialect = DIALECTS[dialect_name]
    answer = expressible(dialect, data.draw(st.sampled_from(list(ANSWERS.values()))))
    text = dialect.write(answer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(dialect_name, pieces) == dialect.expect(answer, is_known)


@pytest.mark.parametrize("dialect_name", DIALECTS)
def test_a_cut_call_is_content(dialect_name: str) -> None:
    """Or the same call, where its end alone is missing. The calls before it are found where they are complete."""
    dialect = DIALECTS[dialect_name]
    (first,), (second,) = find(text="x", count=12), find(text="y } ) z", items=["a", 5])
    begun = dialect.write([(first,)])
    for whole, calls in ((begun, [first]), (dialect.write([(first,), " and ", (second,)]), [first, second])):
        for cut in range(len(whole)):
            content, found = parse(dialect_name, [whole[:cut]])
            if whole[:cut].endswith("<|message|>"):
                continue  # a call without arguments, whose end is a token that no text has
            assert found == calls[: len(found)], whole[:cut]
            assert len(found) >= (cut > len(begun))
            if dialect.format != "harmony":
                assert content == whole[:cut] if not found else content.strip() in whole, whole[:cut]


def iter_single_calls() -> Iterator[Call]:
    """Yield the calls of all answers, of functions that are known."""
    parts = [part for answer in ANSWERS.values() for part in answer if not isinstance(part, str)]
    return (call for part in parts for call in part if call.name in SCHEMAS)


@pytest.mark.parametrize(("dialect_name", "has_special_tokens"), DEMANDED)
def test_a_demanded_call_may_be_any_that_can_be_written(dialect_name: str, has_special_tokens: bool) -> None:
    """And no other function, nor values of other types. Texts with a special token are left out: none has one."""
    dialect = DIALECTS[dialect_name]
    state = demand(dialect_name, TOOLS, has_special_tokens)
    named = demand(dialect_name, [NOW], has_special_tokens)
    tokenizer = compiler_of(dialect.format, has_special_tokens).tokenizer
    special = find_special_tokens(dialect_name, compiler_of(dialect.format, has_special_tokens))
    for call in iter_single_calls():
        if not dialect.can_express(call) or any(
            mark in text for mark in special for text in iter_texts(call.arguments)
        ):
            continue
        text = dialect.write([(call,)])
        assert accepts(state, tokenizer, text), text
        assert accepts(named, tokenizer, text) == (call.name == "now"), text
    for call in WRONG_CALLS:
        assert not accepts(state, tokenizer, dialect.write([(call,)])), call


WRONG_CALLS = [
    Call("seek", {}),
    Call("nowhere", {}),
    Call("find", {"count": "many"}),
    Call("find", {"count": 1.5}),
    Call("find", {"flag": "yes"}),
    Call("find", {"unit": "rankine"}),
    Call("find", {"place": {"city": 5}}),
    Call("find", {"place": {"near": {"city": "x"}}}),
    Call("find", {"other": 1}),
    Call("find", {"items": {"a": 1}}),
    Call("now", {"text": "x"}),
]


@pytest.mark.parametrize(("dialect_name", "has_special_tokens"), DEMANDED)
def test_random_text_of_a_demanded_call_is_one(dialect_name: str, has_special_tokens: bool) -> None:
    """Whatever bytes the grammar allows, the parser reads a call of one of the tools with arguments that validate."""
    compiler = compiler_of(DIALECTS[dialect_name].format, has_special_tokens)
    generator = torch.Generator().manual_seed(5)
    for tools in ([FIND, NOW], [NOW], [STRICT]):
        state = demand(dialect_name, tools, has_special_tokens)
        text = generate(state, compiler, generator)
        content, calls = parse(dialect_name, [text], {tool["name"]: tool["parameters"] for tool in tools})
        assert not content.strip(), text
        (call,) = calls
        schema = next(tool["parameters"] for tool in tools if tool["name"] == call.name)
        jsonschema.validate(call.arguments, schema)


def generate(state: GrammarState, compiler: GrammarCompiler, generator: torch.Generator) -> str:
    """Return random text that a grammar allows, steered to its end: strings would never end."""
    ids: list[int] = []
    closing = [compiler.tokenizer.encode(text, add_special_tokens=False)[0] for text in "<[|;!`/\"')}],｜"]
    (line,) = compiler.tokenizer.encode("\n", add_special_tokens=False)
    special = [i for i in compiler.tokenizer.special_token_ids if i < compiler.vocab_size]
    for step in range(4000):
        logits = torch.randn(1, compiler.vocab_size, generator=generator)
        if step > 40:
            logits[0, closing] += 6.0
            logits[0, line] += 4.0 if step % 2 else -4.0
            logits[0, special] += 60.0
        state.mask_logits(logits, [])
        ids.append(int(logits.argmax()))
        assert state.accept_token(ids[-1])
        if ids[-1] in compiler.tokenizer.stop_token_ids or state.is_complete:
            break
    written = (compiler.tokenizer.token_bytes(i) for i in ids if i not in compiler.tokenizer.stop_token_ids)
    return b"".join(written).decode(errors="replace")


STRICT = {
    "name": "strict",
    "parameters": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["c", "f", "a b"]},
            "count": {"type": "integer"},
            "pair": {"type": "array", "items": {"type": "boolean"}},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["unit", "count", "place"],
        "additionalProperties": False,
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "kind": {"const": "point"}},
                "required": ["kind"],
                "additionalProperties": False,
            }
        },
    },
}


HOSTILE = [
    *("\\", '"', "'", '<|"|>', "{", "}", "[", "]", "(", "=", ":", "[TOOL_CALLS]", "NaN", "1e400", '"a":1,"a":2'),
    *("\\ud800", "\ud800", "[" * 100, "</parameter>", "<parameter=text>", "<arg_key>", "</arg_value>"),
    *("<tool_call>", "\\U00110000"),
]  # fmt: skip


@pytest.mark.parametrize("dialect_name", DIALECTS)
@settings(max_examples=100)
@given(st.data())
@example(None)
def test_broken_calls_are_content_or_calls_however_they_are_cut(dialect_name: str, data: st.DataObject | None) -> None:
    """No text is lost, arguments are objects of JSON in UTF-8, and pieces do not matter."""
    dialect = DIALECTS[dialect_name]
    begin = format_of(dialect_name).begins[0]
    text = f'{begin}[f("\\'
    if data:
        whole = dialect.write(expressible(dialect, data.draw(st.sampled_from(list(ANSWERS.values())))))
        at = data.draw(st.integers(0, len(whole)))
        broken = "".join(data.draw(st.lists(st.sampled_from(HOSTILE), max_size=4)))
        text = data.draw(st.sampled_from([whole[:at], begin])) + broken + whole[at + data.draw(st.integers(0, 3)) :]
    content, calls = parse(dialect_name, [text])
    assert parse(dialect_name, list(text)) == (content, calls)
    assert all(isinstance(call.arguments, dict) and json.dumps(call.arguments, allow_nan=False) for call in calls)
    if not calls and dialect.format != "harmony":
        assert content == text


RECURSIVE = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}]}


@pytest.mark.parametrize("name", [name for name in tool_format_names() if name != "harmony"])
def test_a_schema_that_refers_to_itself_is_read_and_demanded(name: str) -> None:
    """Each format: the value has the type of the alternative that is no reference."""
    tool_format = load_tool_format(name)()
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": RECURSIVE}}
    assert find_types({"$ref": "#/$defs/A"}, schema) == {"integer"}
    assert read_text_value("5", {"$ref": "#/$defs/A"}, schema) == 5
    assert tool_format.build_grammar([{"name": "f", "parameters": schema}]).startswith("start:")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>"),
        ("olmo3", "<function_calls>\nf(a=-1e999)\n</function_calls>"),
        ("gemma4", "<|tool_call>call:f{a:1e999}<tool_call|>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ],
)
def test_a_number_that_json_lacks_is_content(name: str, text: str) -> None:
    parser = ToolParser(load_tool_format(name)(), {"f": {}})
    content, calls = parser.feed(text)
    rest, more = parser.close()
    assert (content + rest, calls + more) == (text, [])
