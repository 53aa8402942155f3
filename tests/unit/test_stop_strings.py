"""Stop strings: the automaton equals its definition wherever the text is cut, and its work is linear."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.processing.detokenizer import IncrementalDetokenizer
from retain.processing.stop_strings import StopStrings, StopStringSearch
from retain.sampling_params import MAX_STOP_LENGTH, SamplingParams
from tests.helpers.counted_work import CountedText, assert_linear, cut_into_pieces

STRINGS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=5)
PIECES = st.lists(st.tuples(st.text("ab", max_size=5), st.booleans()), max_size=12)


def cut_by_definition(pieces: Sequence[tuple[str, bool]], strings: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string that a piece completes which may; of several the longest."""
    text = ""
    for piece, may_stop in pieces:
        for character in piece:
            text += character
            if may_stop and (found := max(filter(text.endswith, strings), key=len, default=None)):
                return text.removesuffix(found), found
    return text, None


@settings(max_examples=200)
@given(STRINGS, PIECES)
def test_search_equals_its_definition(strings: list[str], pieces: list[tuple[str, bool]]) -> None:
    """Text is shown as soon as no stop string can begin in it, and not before."""
    search = StopStringSearch(StopStrings(strings))
    shown = ""
    beginnings = {s[:n] for s in strings for n in range(1, len(s))}
    for num_pieces, piece in enumerate(pieces, 1):
        shown += search.add(*piece)
        text, found = cut_by_definition(pieces[:num_pieces], strings)
        assert search.found == found
        if found:
            assert shown == text
            return
        held = max((b for b in beginnings if text.endswith(b)), key=len, default="")
        assert shown + held == text
    assert shown + search.flush() == cut_by_definition(pieces, strings)[0]


@given(STRINGS, st.text("abc", max_size=30))
def test_answers_that_share_stop_strings_do_not_meet(strings: list[str], text: str) -> None:
    shared = StopStrings(strings)
    other = StopStringSearch(shared)
    other.add("ab")
    alone = StopStringSearch(StopStrings(strings))
    beside = StopStringSearch(shared)
    assert (alone.add(text), alone.flush(), alone.found) == (beside.add(text), beside.flush(), beside.found)


ADVERSARIAL = {  # stop strings and a text of about n characters: what looks like one for long, or again and again
    "one long string": lambda n: (["#" * n], "#" * (n - 1)),
    "sixteen long strings": lambda n: (["#" * (n // 16 + i) + "!" for i in range(16)], "#" * n),
    "almost, often": lambda n: (["a" * (n // 8) + "b"], ("a" * (n // 8) + "c") * 8),
    "almost, at its end": lambda n: (["a" * n + "b", "b" * n], "a" * n + "c" + "b" * (n // 2)),
    "two periods": lambda n: (["ab" * (n // 2) + "c", "ba" * (n // 4)], "ab" * (n // 4 - 1)),
    "each begins in the last": lambda n: (["a" * i + "b" for i in range(1, int((2 * n) ** 0.5))], "a" * n),
}


class Pieces(dict[int, bytes]):
    """Tokens with these texts, in the place of a tokenizer's."""

    errors = "replace"
    strip_space = False

    def last_bytes(self, tokens: Sequence[int]) -> bytes:
        return b""


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("min_tokens", [0, 1000])
def test_work_of_the_detokenizer_is_linear_in_the_text(
    name: str, min_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(n: int) -> Any:
        strings, text = ADVERSARIAL[name](n)

        class Decoder:
            def decode(self, data: bytes, final: bool = False) -> str:
                return CountedText(data.decode())

        monkeypatch.setattr(codecs, "getincrementaldecoder", lambda encoding: lambda errors: Decoder())
        tokens: Any = Pieces(enumerate(piece.encode() for piece in cut_into_pieces(text, 5)))
        stop = StopStrings([CountedText(s) for s in strings])
        detokenizer = IncrementalDetokenizer(tokens, stop, min_tokens=min_tokens)

        def run() -> None:
            for token in tokens:
                detokenizer.add_token(token)
            detokenizer.flush()

        return run

    assert_linear(prepare, 600)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_work_to_build_stop_strings_is_linear_in_their_length(name: str) -> None:
    def prepare(n: int) -> Any:
        strings = [CountedText(s) for s in ADVERSARIAL[name](n)[0]]
        return lambda: StopStrings(strings)

    assert_linear(prepare, 600)


def test_stop_strings_are_bounded_together() -> None:
    assert SamplingParams(stop=("a" * (MAX_STOP_LENGTH - 1), "b"))
