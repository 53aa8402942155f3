"""Incremental detokenization: it equals `decode`, keeps characters whole, and never shows or delays stop strings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.processing.stop_strings import StopStrings
from tests.helpers.counted_work import assert_linear
from tests.helpers.marks import slow
from tests.helpers.tokenizers import BUNDLED, open_tokenizer

KINDS = ["sentencepiece", *slow("bytes", "unspaced", *BUNDLED)]
EVERY_KIND = ["sentencepiece", "llama-folder", "unigram", "bytes", "unspaced", "smollm2", *slow("gemma3")]


@cache
def byte_tokens(kind: str) -> list[int]:
    """Return tokens of one byte, which may be part of a character, and some special tokens."""
    k = open_tokenizer(kind)
    candidates = range(k.vocab_size if k.vocab_size < 1000 else 300 if kind == "smollm2" else 500)
    return [i for i in candidates if len(k.token_bytes(i)) == 1] + list(k.special_token_ids)[:5]


def token_sequences(kind: str) -> st.SearchStrategy[list[int]]:
    """Generate random tokens, tokens of single bytes, and tokens of real text, cut anywhere."""
    k = open_tokenizer(kind)
    texts = ("日本語 🦤 étude", " <unk> the cat sat\n\n", "hello world, the end", "👨‍👩‍👧🇩🇪")
    parts = st.one_of(
        st.lists(st.integers(0, k.vocab_size + 3), max_size=6),
        st.lists(st.sampled_from(byte_tokens(kind)), max_size=6),
        st.sampled_from([k.encode(t) for t in texts]).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[n:])),
    )
    return st.lists(parts, max_size=5).map(lambda lists: [i for tokens in lists for i in tokens])


def for_each_tokenizer(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.parametrize("kind", KINDS)(
            settings(max_examples=max_examples, derandomize=True)(given(data=st.data())(test))
        )

    return wrap


@for_each_tokenizer(100)
def test_joined_results_equal_decode(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    stream = k.create_detokenizer()
    texts = [stream.add_token(i) for i in tokens] + [stream.flush()]
    assert "".join(texts) == stream.text == k.decode(tokens)
    assert stream.flush() == "" and not stream.stopped


@for_each_tokenizer(80)
def test_decode_equals_the_library(kind: str, data: st.DataObject) -> None:
    """At an invalid SentencePiece byte the library drops the valid bytes beside it too; this tokenizer keeps them."""
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    ours, theirs = k.decode(tokens), k._core.decode([i for i in tokens if i < k.vocab_size])
    if kind in ("smollm2", "bytes") or "\ufffd" not in ours:
        assert ours == theirs


@for_each_tokenizer(80)
def test_characters_are_shown_exactly_when_they_are_complete(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    stream, data = k.create_detokenizer(), b""
    for i in tokens:
        data += b"" if i in k.special_token_ids else k.token_bytes(i)
        stream.add_token(i)
        complete = data
        while complete:  # without an incomplete character at the end
            try:
                complete.decode()
            except UnicodeDecodeError as e:
                if e.reason != "unexpected end of data":
                    break
                complete = complete[: e.start]
            else:
                break
        if "\ufffd" not in (expected := complete.decode(errors="replace")):
            assert stream.text == (expected.removeprefix(" ") if kind == "sentencepiece" else expected)


@pytest.mark.parametrize("kind", EVERY_KIND)
@settings(max_examples=80, derandomize=True)
@given(data=st.data())
def test_prompt_and_answer_are_one_text(kind: str, data: st.DataObject) -> None:
    """Wherever a text is split into prompt and answer: text(prompt) + answer == text(prompt + answer)."""
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    cut = data.draw(st.integers(0, len(tokens)))
    prompt = k.create_detokenizer()
    complete = "".join(map(prompt.add_token, tokens[:cut]))
    answer = k.create_detokenizer(preceding=tokens[:cut])
    chunks = [answer.add_token(i) for i in tokens[cut:]] + [answer.flush()]
    assert complete + "".join(chunks) == k.decode(tokens)
    assert answer.text == "".join(chunks)
    if not prompt.flush():  # the prompt does not end within a character
        assert k.decode(tokens[:cut]) + answer.text == k.decode(tokens)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama-folder", "unigram"])
def test_only_the_start_of_a_text_loses_its_space(kind: str) -> None:
    k = open_tokenizer(kind)
    token = next(i for i in range(k.vocab_size) if k.token_bytes(i) == b" the")
    bos = next(i for i in k.special_token_ids if k.token_bytes(i) == b"<s>")
    for preceding, text in (
        ([], "the the"),
        ([bos], "the the"),
        ([bos, token], " the the"),
        ([token, bos], " the the"),
    ):
        stream = k.create_detokenizer(preceding=preceding)
        assert stream.add_token(token) + stream.add_token(token) + stream.flush() == text


def cut_at_stop(text: str, stop: list[str], min_chars: int = 0) -> tuple[str, bool]:
    """Cut a text before the stop string that is complete first, after `min_chars`; of several, the longest."""
    for end in range(min_chars, len(text) + 1):
        if hits := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, hits))], True
    return text, False


@for_each_tokenizer(100)
def test_stop_strings_are_never_shown_and_never_late(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    text = k.decode(tokens)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stop = [s for s in data.draw(st.lists(spans | st.text("the cat\n", min_size=1, max_size=3), max_size=3)) if s]
    expected, stopped = cut_at_stop(text, stop)
    stream = k.create_detokenizer(StopStrings(stop))
    for n, i in enumerate(tokens, 1):
        assert stream.add_token(i) == "" or len(stream.text) <= len(expected)
        complete = k.decode(tokens[:n]).rstrip("\ufffd")
        assert stream.stopped or not cut_at_stop(complete, stop)[1]  # not late
        held = complete[len(stream.text) :]
        assert stream.stopped or not held or any(s.startswith(held) for s in stop)  # nothing else is held back
    stream.flush()
    assert (stream.text, stream.stopped) == (expected, stopped)


@for_each_tokenizer(100)
def test_stop_strings_end_no_text_within_min_tokens(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    text, min_tokens = k.decode(tokens), data.draw(st.integers(0, 8))
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stop = [s for s in data.draw(st.lists(spans | st.text("the cat\n", min_size=1, max_size=3), max_size=3)) if s]
    plain = k.create_detokenizer()
    num_chars = sum(len(plain.add_token(i)) for i in tokens[:min_tokens])
    stream = k.create_detokenizer(StopStrings(stop), min_tokens=min_tokens)
    for i in tokens:
        stream.add_token(i)
    stream.flush()
    may_stop = len(tokens) > min_tokens
    expected = cut_at_stop(text, stop, num_chars + 1 if min_tokens else 0) if may_stop else (text, False)
    assert (stream.text, stream.stopped) == expected


def test_stop_string_examples() -> None:
    k = open_tokenizer("smollm2")

    def run(text: str, *stop: str) -> tuple[str, bool]:
        stream = k.create_detokenizer(StopStrings(stop))
        shown = "".join([stream.add_token(i) for i in k.encode(text)] + [stream.flush()])
        assert shown == stream.text
        return shown, stream.stopped

    assert run("one\n\ntwo") == ("one\n\ntwo", False)
    assert run("one\n\ntwo", "\n\n") == ("one", True)
    assert run("one\ntwo\n", "\n\n") == ("one\ntwo\n", False)
    assert run("User: hi", "User:", "Us") == ("", True)
    assert run("aab", "ab") == ("a", True)
    assert run("abc", "b", "abc") == ("a", True)
    assert run("abc", "bc", "abc") == ("", True)
    assert run("x🦤y", "🦤") == ("x", True)
    with pytest.raises(ValueError, match="stop string must not be empty"):
        k.create_detokenizer(StopStrings(["a", ""]))


def test_character_of_several_tokens_is_shown_with_the_last() -> None:
    k = open_tokenizer("smollm2")
    tokens = k.encode("🦤")
    assert len(tokens) > 1
    stream = k.create_detokenizer()
    assert [stream.add_token(i) for i in tokens] == [""] * (len(tokens) - 1) + ["🦤"]
    stream = k.create_detokenizer()
    assert [stream.add_token(i) for i in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.flush() == k.decode(tokens[:-1]) == "\ufffd"


def test_sentencepiece_bytes_are_shown_with_the_last_of_a_character() -> None:
    """Not only at the end of a sequence of bytes. An invalid byte becomes one U+FFFD."""
    k = open_tokenizer("unspaced")
    stream = k.create_detokenizer()
    assert [stream.add_token(3 + b) for b in "éö".encode()] == ["", "é", "", "ö"]
    assert k.decode([3 + b for b in b"\xc3\xa9\xff\xe2\x82"]) == "é\ufffd\ufffd\ufffd"


def test_special_tokens_are_neither_shown_nor_stop_strings() -> None:
    k = open_tokenizer("smollm2")
    stream = k.create_detokenizer(StopStrings(["<|im_end|>"]))
    assert [stream.add_token(i) for i in (19556, 2, 905)] == ["Hello", "", " world"]
    assert not stream.stopped


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_work_of_a_token_does_not_grow_with_the_answer(kind: str) -> None:
    k = open_tokenizer(kind)
    token = next(i for i in byte_tokens(kind) if k.token_bytes(i) >= b"\x80")  # never a complete character

    def prepare(num_tokens: int) -> Callable[[], object]:
        stream = k.create_detokenizer(StopStrings(["\ufffd" * 7 + "x", "the end"]))

        def add_tokens() -> None:
            for _ in range(num_tokens):
                stream.add_token(token)
            stream.flush()
            assert stream.text == "\ufffd" * num_tokens

        return add_tokens

    assert_linear(prepare, 2000)
