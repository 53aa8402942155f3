"""Forms: what may come next, behind drafts too, and that looking ahead changes nothing."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.models.resolve import resolve_model
from retain.processing import Tokenizer
from retain.processing.grammar import GrammarCompiler, grammar_from_json_schema


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def compiler(request):
    tokenizer = Tokenizer.open(resolve_model(request.param))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 7)  # a row of logits may be longer than the vocabulary


PERSON = {"a": 1, "b": ["x", None, True], "c": {"d": "é"}}


def allowed_tokens(grammar, drafts, vocab_size):
    logits = torch.zeros(len(drafts) + 1, vocab_size)
    grammar.mask_logits(logits, drafts)
    return logits == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_comes_behind_drafts_is_what_came_behind_tokens(compiler, data):
    """Row i for i drafts is the only row after i tokens; and to ask changes nothing."""
    ids = compiler.tokenizer.encode(json.dumps(PERSON, ensure_ascii=False), add_special_tokens=False)
    start = data.draw(st.integers(0, len(ids) - 1))
    n = data.draw(st.integers(0, min(6, len(ids) - start)))
    wrong = data.draw(st.one_of(st.none(), st.integers(0, max(n - 1, 0))))
    form, other = (compiler.compile(grammar_from_json_schema(True)) for _ in range(2))
    for token in ids[:start]:
        assert not form.accept_token(token)
        other.accept_token(token)
    drafts = list(ids[start : start + n])
    if wrong is not None and n:
        drafts[wrong] = compiler.vocab_size - 1  # no such token
    rows = allowed_tokens(form, drafts, compiler.vocab_size)
    for i, draft in enumerate([*drafts, None]):
        assert torch.equal(rows[i], allowed_tokens(other, [], compiler.vocab_size)[0])
        if draft is None or not rows[i, draft]:
            break
        other.accept_token(draft)
    assert torch.equal(allowed_tokens(form, [], compiler.vocab_size)[0], rows[0])
    assert not rows[:, compiler.tokenizer.vocab_size :].any() or wrong is not None


def test_an_object_ends_an_answer(compiler):
    form = compiler.compile(grammar_from_json_schema({"type": "object"}))
    ids = compiler.tokenizer.encode('{"a": 1}', add_special_tokens=False)
    for token in ids:
        assert allowed_tokens(form, [], compiler.vocab_size)[0, token]
        over = form.accept_token(token)
    rows = allowed_tokens(form, [], compiler.vocab_size)[0].nonzero().flatten().tolist()
    assert over or set(rows) & compiler.tokenizer.stop_token_ids


@pytest.mark.parametrize("wanted", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}])
def test_a_schema_that_is_none_is_one_line(compiler, wanted):
    with pytest.raises(ValueError) as error:
        compiler.compile(grammar_from_json_schema(wanted))
    assert "\n" not in str(error.value)


def test_a_schema_is_bounded():
    deep: dict = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    with pytest.raises(ValueError, match="deep"):
        grammar_from_json_schema(deep)
