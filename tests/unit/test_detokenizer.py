"""Streams: strung together they are `decode`, characters are whole, stop strings are never shown and never late."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.models.resolve import resolve_model
from retain.processing import Tokenizer
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint

SMALL_VOCABULARIES: dict[str, dict[str, Any]] = {
    "bytes": BYTE_LEVEL_VOCABULARY,
    "sentencepiece": SENTENCEPIECE_VOCABULARY,
    "unspaced": {**SENTENCEPIECE_VOCABULARY, "tokenizer.ggml.add_space_prefix": False},
}
KINDS = ["smollm2", "gemma3", *SMALL_VOCABULARIES]


@cache
def open_tokenizer(kind: str) -> Tokenizer:
    if kind not in SMALL_VOCABULARIES:
        return Tokenizer.open(resolve_model(kind))
    with TemporaryDirectory() as folder:
        return Tokenizer.open(
            write_gguf(Path(folder) / "m.gguf", tiny_checkpoint("llama"), vocabulary=SMALL_VOCABULARIES[kind])
        )


@cache
def byte_tokens(kind: str) -> list[int]:
    """The tokens that are one byte, or part of a character: where everything can go wrong."""
    k = open_tokenizer(kind)
    few = range(k.vocab_size if k.vocab_size < 1000 else 300 if kind == "smollm2" else 500)
    return [i for i in few if len(k.token_bytes(i)) == 1] + list(k.special_token_ids)[:5]


def token_sequences(kind: str) -> st.SearchStrategy[list[int]]:
    """Tokens at random, tokens of bytes, and tokens of real text, cut anywhere."""
    k = open_tokenizer(kind)
    texts = ("日本語 🦤 étude", " <unk> the cat sat\n\n", "hello world, the end", "👨‍👩‍👧🇩🇪")
    pieces = st.one_of(
        st.lists(st.integers(0, k.vocab_size + 3), max_size=6),
        st.lists(st.sampled_from(byte_tokens(kind)), max_size=6),
        st.sampled_from([k.encode(t) for t in texts]).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[n:])),
    )
    return st.lists(pieces, max_size=5).map(lambda parts: [i for part in parts for i in part])


def for_each_tokenizer(max_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.parametrize("kind", KINDS)(
            settings(max_examples=max_examples, deadline=None, derandomize=True)(given(data=st.data())(test))
        )

    return wrap


@for_each_tokenizer(300)
def test_the_pieces_are_the_whole(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    stream = k.create_detokenizer()
    pieces = [stream.add_token(i) for i in tokens]
    pieces.append(stream.flush())
    assert "".join(pieces) == stream.text == k.decode(tokens)
    assert stream.flush() == "" and not stream.stopped


@for_each_tokenizer(200)
def test_decode_is_that_of_the_library(kind: str, data: st.DataObject) -> None:
    """With SentencePiece a broken byte makes the library throw away the good ones beside it too; we keep those."""
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    ours, theirs = k.decode(tokens), k._core.decode([i for i in tokens if i < k.vocab_size])
    if kind in ("smollm2", "bytes") or "\ufffd" not in ours:
        assert ours == theirs


@for_each_tokenizer(200)
def test_characters_are_shown_when_they_are_complete_and_not_before(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    stream, seen = k.create_detokenizer(), b""
    for i in tokens:
        seen += b"" if i in k.special_token_ids else k.token_bytes(i)
        stream.add_token(i)
        whole = seen
        while whole:  # the bytes without the beginning of a character at their end
            try:
                whole.decode()
            except UnicodeDecodeError as e:
                if e.reason != "unexpected end of data":
                    break
                whole = whole[: e.start]
            else:
                break
        if "\ufffd" not in (right := whole.decode(errors="replace")):
            assert stream.text == (right.removeprefix(" ") if kind == "sentencepiece" else right)


def cut_at_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of those the one that began first."""
    for end in range(len(text) + 1):
        if hits := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, hits))], True
    return text, False


@for_each_tokenizer(300)
def test_stop_strings(kind: str, data: st.DataObject) -> None:
    k, tokens = open_tokenizer(kind), data.draw(token_sequences(kind))
    text = k.decode(tokens)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    stop = [s for s in data.draw(st.lists(spans | st.text("the cat\n", min_size=1, max_size=3), max_size=3)) if s]
    right, stopped = cut_at_stop(text, stop)
    stream = k.create_detokenizer(stop)
    for n, i in enumerate(tokens, 1):
        assert stream.add_token(i) == "" or len(stream.text) <= len(right)
        so_far = k.decode(tokens[:n])
        ready = so_far[: -len(held)] if (held := so_far[len(so_far.rstrip("\ufffd")) :]) else so_far
        assert stream.stopped or not cut_at_stop(ready, stop)[1]  # not late
        rest = ready[len(stream.text) :]
        assert stream.stopped or not rest or any(s.startswith(rest) for s in stop)  # and nothing else held back
    stream.flush()
    assert (stream.text, stream.stopped) == (right, stopped)


def test_the_same_by_hand() -> None:
    k = open_tokenizer("smollm2")

    def run(text: str, *stop: str) -> tuple[str, bool]:
        stream = k.create_detokenizer(stop)
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
        k.create_detokenizer(["a", ""])


def test_a_character_over_three_tokens() -> None:
    k = open_tokenizer("smollm2")
    tokens = k.encode("🦤")
    assert len(tokens) > 1
    stream = k.create_detokenizer()
    assert [stream.add_token(i) for i in tokens] == [""] * (len(tokens) - 1) + ["🦤"]
    stream = k.create_detokenizer()
    assert [stream.add_token(i) for i in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.flush() == k.decode(tokens[:-1]) == "\ufffd"


def test_bytes_of_sentencepiece() -> None:
    """A character is shown at its last byte, not at the end of the run of bytes; a broken byte costs only itself."""
    k = open_tokenizer("unspaced")
    stream = k.create_detokenizer()
    assert [stream.add_token(3 + b) for b in "éö".encode()] == ["", "é", "", "ö"]
    assert k.decode([3 + b for b in b"\xc3\xa9\xff\xe2\x82"]) == "é\ufffd\ufffd\ufffd"


def test_special_tokens_are_not_shown_and_not_stop_strings() -> None:
    k = open_tokenizer("smollm2")
    stream = k.create_detokenizer(["<|im_end|>"])
    assert [stream.add_token(i) for i in (19556, 2, 905)] == ["Hello", "", " world"]
    assert not stream.stopped


@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece"])
def test_a_token_costs_the_same_however_long_the_answer(kind: str) -> None:
    k = open_tokenizer(kind)
    one = next(i for i in byte_tokens(kind) if k.token_bytes(i) >= b"\x80")  # never a whole character
    stream = k.create_detokenizer(["\ufffd" * 7 + "x", "the end"])
    start = time.perf_counter()
    for _ in range(100_000):
        stream.add_token(one)
    assert time.perf_counter() - start < 10  # one second when nothing else runs; minutes if it looked back
    stream.flush()
    assert stream.text == "\ufffd" * 100_000
