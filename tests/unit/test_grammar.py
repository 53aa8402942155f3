"""Grammars: which tokens may follow, after drafts too, and that masking changes no state."""

import json
from copy import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.processing.grammar import (
    DEAD_END,
    INVALID_GRAMMAR,
    MATCHES_NOTHING,
    GrammarCompiler,
    grammar_from_json_schema,
    grammar_from_lark,
    lark_json_rule,
)
from tests.helpers.marks import slow
from tests.helpers.tokenizers import open_tokenizer


@pytest.fixture(scope="session", params=["smollm2", *slow("gemma3")])
def compiler(request):
    tokenizer = open_tokenizer(request.param)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 7)  # logits may have more columns than tokens


PERSON = {"a": 1, "b": ["x", None, True], "c": {"d": "é"}}


def allowed_tokens(grammar, drafts, vocab_size):
    logits = torch.zeros(len(drafts) + 1, vocab_size)
    grammar.mask_logits(logits, drafts)
    return logits == 0


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_mask_after_drafts_equals_mask_after_tokens(compiler, data):
    """Row i of a mask with drafts is the mask after the first i drafts; masking itself changes no state."""
    ids = compiler.tokenizer.encode(json.dumps(PERSON, ensure_ascii=False), add_special_tokens=False)
    start = data.draw(st.integers(0, len(ids) - 1))
    n = data.draw(st.integers(0, min(6, len(ids) - start)))
    invalid = data.draw(st.one_of(st.none(), st.integers(0, max(n - 1, 0))))
    grammar, other = (compiler.compile(grammar_from_json_schema(True)) for _ in range(2))
    for token in ids[:start]:
        assert grammar.accept_token(token) and other.accept_token(token) and not grammar.is_complete
    drafts = list(ids[start : start + n])
    if invalid is not None and n:
        drafts[invalid] = compiler.vocab_size - 1  # no token has this id
    rows = allowed_tokens(grammar, drafts, compiler.vocab_size)
    for i, draft in enumerate([*drafts, None]):
        assert torch.equal(rows[i], allowed_tokens(other, [], compiler.vocab_size)[0])
        if draft is None or not rows[i, draft]:
            break
        other.accept_token(draft)
    assert torch.equal(allowed_tokens(grammar, [], compiler.vocab_size)[0], rows[0])
    assert not rows[:, compiler.tokenizer.vocab_size :].any() or invalid is not None


def test_complete_object_ends_the_answer(compiler):
    grammar = compiler.compile(grammar_from_json_schema({"type": "object"}))
    ids = compiler.tokenizer.encode('{"a": 1}', add_special_tokens=False)
    for token in ids:
        assert allowed_tokens(grammar, [], compiler.vocab_size)[0, token]
        assert grammar.accept_token(token)
    allowed = allowed_tokens(grammar, [], compiler.vocab_size)[0].nonzero().flatten().tolist()
    assert grammar.is_complete or set(allowed) & compiler.tokenizer.stop_token_ids


def test_a_grammar_that_is_invalid_is_refused_in_our_own_words(compiler):
    for text in ("start: nowhere", "start: %json {", "x" * 5000):
        with pytest.raises(ValueError) as error:
            compiler.compile(grammar_from_lark(text))
        assert str(error.value) == INVALID_GRAMMAR


@pytest.mark.parametrize("text", ["start: start", "start: a\na: b\nb: a", r"start: /[^\s\S]/"])
def test_a_grammar_that_matches_nothing_is_refused(compiler, text):
    with pytest.raises(ValueError) as error:
        compiler.compile(grammar_from_lark(text))
    assert str(error.value) == MATCHES_NOTHING


DEAD_END_GRAMMAR = 'start: "a" x | "ab"\nx: "c" y\ny: y'


def test_a_dead_end_refuses_whatever_is_sampled(compiler):
    """The end of the text too; and a draft that leads into one changes nothing."""
    a, b, c = (compiler.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    state = compiler.compile(grammar_from_lark(DEAD_END_GRAMMAR))
    assert state.accept_token(a)
    logits = torch.zeros(3, compiler.vocab_size)
    state.mask_logits(logits, [c, b])
    assert {b, c} <= set((logits[0] == 0).nonzero().flatten().tolist())
    assert not logits[1:].isinf().any()  # something must be sampled
    other = compiler.compile(grammar_from_lark(DEAD_END_GRAMMAR))
    assert other.accept_token(a) and other.accept_token(c) and not other.is_complete
    for token in (min(compiler.tokenizer.stop_token_ids), a):
        assert not other.accept_token(token) and not other.is_complete and other.error == DEAD_END
    assert state.accept_token(b) and state.is_complete


def test_a_text_that_no_token_writes_is_a_dead_end():
    """The vocabulary has no brace: refused where the text begins with one, else where it comes."""
    tokenizer = open_tokenizer("bytes")
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError) as error:
        compiler.compile(grammar_from_lark('start: "{" "a"'))
    assert str(error.value) == MATCHES_NOTHING
    state = compiler.compile(grammar_from_lark('start: "a" "{"'))
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert state.accept_token(a) and not state.is_complete
    assert not state.accept_token(min(tokenizer.stop_token_ids)) and state.error == DEAD_END


@pytest.mark.parametrize("kind", ["sentencepiece", "llama-folder", "unigram", "unspaced", "bytes"])
@pytest.mark.parametrize("text", ["the cat sat", " the cat", "cat", "é the", '{"the": [1]}'])
def test_a_grammar_of_one_text_gives_that_text(kind, text):
    """With every kind of tokenizer: none puts a space before what continues a text. Or else it is refused."""
    tokenizer = open_tokenizer(kind)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    written = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} - {b"<unk>"}
    if not all(bytes([byte]) in written or char.encode() in written for char in text for byte in char.encode()):
        with pytest.raises(ValueError, match=MATCHES_NOTHING):
            compiler.compile(grammar_from_lark(f"start: {json.dumps(text)}"))
        return
    state, tokens = compiler.compile(grammar_from_lark(f"start: {json.dumps(text)}")), []
    while not state.is_complete:
        allowed = allowed_tokens(state, [], tokenizer.vocab_size)[0].nonzero().flatten().tolist()
        tokens.append(max(allowed, key=lambda i: len(tokenizer.token_bytes(i))))
        assert state.accept_token(tokens[-1])
    prompt = tokenizer.encode("a")
    answer = tokenizer.create_detokenizer(preceding=prompt)
    assert "".join(map(answer.add_token, tokens)) + answer.flush() == text


def test_a_row_without_a_possible_token_stays_as_it_is(compiler):
    """Where something else than the grammar forbids what it allows."""
    a = compiler.tokenizer.encode("a", add_special_tokens=False)[0]
    state = compiler.compile(grammar_from_lark('start: "a"'))
    logits = torch.zeros(1, compiler.vocab_size)
    logits[0, a] = -torch.inf
    state.mask_logits(logits, [])
    assert logits.isinf().sum() == 1
    assert not state.accept_token(a + 1) and state.error == DEAD_END


def test_deeply_nested_schemas_are_refused():
    deep: dict = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    for build in (grammar_from_json_schema, lambda schema: lark_json_rule("rule", schema)):
        with pytest.raises(ValueError, match="deep"):
            build(deep)


def test_a_copy_follows_its_own_answer(compiler):
    grammar = compiler.compile(grammar_from_json_schema({"enum": [11, 22]}))
    copy = grammar.copy()
    again = grammar.copy()
    start = allowed_tokens(grammar, [], compiler.vocab_size)
    one = compiler.tokenizer.encode_continuation("1")[0]
    two = compiler.tokenizer.encode_continuation("2")[0]
    assert copy.accept_token(one) and not copy.accept_token(two)
    assert torch.equal(allowed_tokens(grammar, [], compiler.vocab_size), start)
    assert grammar.accept_token(two) and grammar.accept_token(two) and grammar.is_complete
    assert torch.equal(allowed_tokens(again, [], compiler.vocab_size), start)


def test_without_an_end_token_every_token_is_text(tmp_path):
    """The first token of the vocabulary is no end, whatever size the vocabulary has."""
    tokenizer = open_tokenizer("bytes")
    endless = copy(tokenizer)
    endless.stop_token_ids = frozenset()
    endless.special_token_ids = frozenset()
    for vocab_size in range(tokenizer.vocab_size, tokenizer.vocab_size + 33):  # models pad their rows
        compiler = GrammarCompiler(endless, vocab_size)
        state = compiler.compile(grammar_from_lark("start: /(.|\\n)*/"))
        for token in range(tokenizer.vocab_size):
            if endless.token_bytes(token).isascii() and endless.token_bytes(token):
                other = state.copy()
                assert other.allowed_tokens()[token] and other.accept_token(token) and not other.is_complete
