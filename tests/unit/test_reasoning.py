"""Laws of reasoning in generated text: its pieces are the text, stop strings are searched behind it, budgets end it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retain.models import list_families
from retain.models.resolve import resolve_model
from retain.processing.grammar import GrammarCompiler, grammar_from_lark
from retain.processing.lark import precede_with_reasoning
from retain.processing.reasoning import (
    KNOWN_MARKS,
    Reasoning,
    ReasoningMarks,
    ReasoningSplitter,
    ReasoningState,
    TextPart,
    find_reasoning_marks,
)
from retain.processing.reasoning_limit import ReasoningLimit
from retain.processing.stop_strings import StopStrings
from retain.processing.template_text import read_template_text
from retain.processing.tokenizer import Tokenizer
from tests.helpers.tokenizers import open_tokenizer

MARKS = st.sampled_from(KNOWN_MARKS)
STATES = st.sampled_from(ReasoningState)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[ReasoningMarks, list[str]]:
    """Draw marks, and pieces of a text with marks and parts of them."""
    marks = draw(MARKS)
    parts = [
        marks.begin,
        marks.end,
        marks.begin[:3],
        marks.begin[3:],
        marks.end[:3],
        marks.end[3:],
        "a",
        "b ",
        "\n",
        " ",
    ]
    return marks, draw(st.lists(st.sampled_from(parts), max_size=12))


def split(marks: Sequence[ReasoningMarks], is_open: bool, pieces: Sequence[str]) -> list[tuple[TextPart, str]]:
    """Return the parts of a text, neighbours of a kind joined."""
    splitter = ReasoningSplitter(marks, is_open)
    found = [part for piece in pieces for part in splitter.feed(piece, finished=False)]
    joined: list[tuple[TextPart, str]] = []
    for part, text in [*found, *splitter.feed("", finished=True)]:
        if joined and joined[-1][0] is part:
            joined[-1] = (part, joined[-1][1] + text)
        else:
            joined.append((part, text))
    return joined


@given(cut_texts(), st.booleans(), st.booleans())
def test_pieces_join_to_the_text_however_it_is_cut(
    drawn: tuple[ReasoningMarks, list[str]], is_open: bool, knows_all: bool
) -> None:
    marks, pieces = drawn
    known = [marks, *(m for m in KNOWN_MARKS if m is not marks and not m.repeats)] if knows_all else [marks]
    text = "".join(pieces)
    whole = split(known, is_open, [text])
    assert split(known, is_open, pieces) == split(known, is_open, list(text)) == whole
    assert "".join(part for _, part in whole) == text


@given(cut_texts(), STATES, st.lists(st.sampled_from(["a", "b ", "a\n", "ab", "<", ">a", "]b", ">", "\n"]), max_size=3))
def test_stop_strings_are_searched_in_the_answer_alone(
    drawn: tuple[ReasoningMarks, list[str]], state: ReasoningState, stop: list[str]
) -> None:
    """A text with reasoning stops where its answer does, if that is all of the text."""
    marks, pieces = drawn
    tokenizer = open_tokenizer("bytes")
    text = "".join(pieces)
    parts = split([marks], state is ReasoningState.OPEN, [text])
    if [part for part, _ in parts].count(TextPart.ANSWER) > 1:  # of gpt-oss: several texts
        return
    before = "".join(part for kind, part in parts if kind is not TextPart.ANSWER)
    answer = "".join(part for kind, part in parts if kind is TextPart.ANSWER)
    if not text.startswith(before):  # text before the reasoning of gpt-oss
        return
    ids = [tokenizer.encode(character, add_special_tokens=False) for character in text]
    if not all(ids):  # the vocabulary has no "|"
        return
    detokenizer = tokenizer.create_detokenizer(StopStrings(stop), reasoning=Reasoning(marks, state))
    shown = "".join(detokenizer.add_token(i[0]) for i in ids) + detokenizer.flush()
    alone = tokenizer.create_detokenizer(StopStrings(stop))
    offset = len(before)
    expected = "".join(alone.add_token(i[0]) for i in ids[offset:]) + alone.flush()
    assert len(answer) == len(ids) - offset
    assert (shown, detokenizer.stop_string) == (before + expected, alone.stop_string)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("marks", [m for m in KNOWN_MARKS if not m.repeats], ids=lambda m: m.begin.strip("<>[|]"))
@pytest.mark.parametrize("state", [ReasoningState.OPEN, ReasoningState.POSSIBLE])
def test_a_budget_ends_reasoning(num_tokens: int, marks: ReasoningMarks, state: ReasoningState) -> None:
    """Whatever is sampled: then the form follows. Drafts change nothing."""
    tokenizer = Tokenizer.open(resolve_model("smollm2"))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    reasoning = Reasoning(marks, state)
    start = compiler.compile(grammar_from_lark(precede_with_reasoning('start: "yes"', reasoning)))
    start.reasoning_limit = ReasoningLimit(reasoning, num_tokens, tokenizer)
    begun = tokenizer.encode(marks.begin, add_special_tokens=False) if state is ReasoningState.POSSIBLE else []
    generator = torch.Generator().manual_seed(num_tokens)
    grammar = start.copy()
    tokens: list[int] = []
    while not grammar.is_complete and len(tokens) < 100:
        logits = torch.randn(1, tokenizer.vocab_size, generator=generator)
        if len(tokens) < len(begun):
            logits[0, begun[len(tokens)]] = 100
        grammar.mask_logits(logits, [])
        tokens.append(int(logits.argmax()))
        assert grammar.accept_token(tokens[-1])
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
    assert marks.end in text and "yes" in text
    end = len(tokenizer.encode(marks.end, add_special_tokens=False))
    inside = b"".join(map(tokenizer.token_bytes, tokens[: len(begun) + num_tokens + end + 4]))
    assert marks.end.encode() in inside
    drafted = start.copy()
    logits = torch.zeros(len(tokens) + 1, tokenizer.vocab_size)
    drafted.mask_logits(logits, tokens)
    for token, row in zip(tokens, logits, strict=False):
        alone = torch.zeros(1, tokenizer.vocab_size)
        drafted.mask_logits(alone, [])
        assert torch.equal(alone[0], row) and drafted.accept_token(token)


@pytest.mark.parametrize(
    ("template", "begin", "answer_begin"),
    [
        ("{{ '</think>' }}", "<think>", ""),
        ("{% if thinking %}<think></think><response></response>{% endif %}", "<think>", "<response>"),
        ("[THINK][/THINK]", "[THINK]", ""),
        ("<|channel>thought\n<channel|>", "<|channel>thought", ""),
        ("<|start|>assistant<|channel|>analysis<|message|><|end|>", "<|channel|>analysis<|message|>", ""),
        ("<|START_THINKING|><|END_THINKING|>", "<|START_THINKING|>", ""),
        ("<|user|>{{ m }}<|end|>", None, None),
    ],
)
def test_marks_are_those_that_the_template_shows(template: str, begin: str | None, answer_begin: str | None) -> None:
    found = find_reasoning_marks(template)
    assert (found.begin, found.answer_begin) == (begin, answer_begin) if found else begin is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a{{ 'b' + x }}c{# d #}", "ab…c"),
        ("{{- '<call>\\n' -}}{{ call | tojson }}", "<call>\n{…}"),
        ("{% if x == 'no' %}{{ \"\\uff5c\" }}{% endif %}{% set y = 'later' %}", "｜later"),
        ("{{ 'not closed }}", "{{ 'not closed }}"),
        ("{{ '｜' ~ x ~ '\\n' }}", "｜…\n"),
    ],
)
def test_the_text_of_a_template(source: str, text: str) -> None:
    assert read_template_text(source) == text


def test_each_family_of_marks_is_one_that_there_is() -> None:
    named = [family for marks in KNOWN_MARKS for family in marks.families]
    assert len(set(named)) == len(named) and set(named) <= set(list_families())
