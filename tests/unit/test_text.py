"""A text hashes each block once, and its hashes are those of a text that is built anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.kv import text as module
from retain.kv.text import Text, hash_blocks

LINK = b"0123456789abcdef"
WINDOWS = np.array([4, 2**30], np.int32)


@given(st.lists(st.one_of(st.lists(st.integers(0, 2**31 - 1), max_size=9), st.integers(1, 5)), max_size=20))
def test_a_text_that_grows_and_shrinks_equals_one_that_is_built_anew(changes: list[list[int] | int]) -> None:
    text = Text()
    expected: list[int] = []
    for change in changes:
        if isinstance(change, list):
            text.ids += change
            expected += change
        else:
            n = min(change, len(expected))
            text.drop(n)
            expected = expected[: len(expected) - n]
        tokens = np.array(expected, np.int32)
        assert len(text) == len(expected)
        assert np.array_equal(text.tokens, tokens)
        for size in (1, 3):
            assert text.block_hashes(LINK, size) == hash_blocks(LINK, tokens, size)
            assert text.block_hashes(LINK, size, 4) == hash_blocks(LINK, tokens[:4], size)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from([b"x", b"y"]), st.integers(1, 12)), min_size=2, max_size=2),
    st.sampled_from([1, 2, 3, 5]),
)
def test_hashes_are_equal_where_tokens_and_their_keys_are(
    tokens: list[int], keys: list[tuple[bytes, int]], size: int
) -> None:
    """A text with a key from some position on, one with another, and one without."""
    texts = [Text(tokens, "", *key) for key in [*keys, (b"", 0)]]
    grown = Text(tokens[:1], "", *keys[0])
    for i in range(1, len(tokens)):
        grown.block_hashes(LINK, size)
        grown.ids.append(tokens[i])
    assert grown.block_hashes(LINK, size) == texts[0].block_hashes(LINK, size)
    for a in texts:
        for b in texts:
            for end in range(size, len(tokens) + 1):
                active = [(t.extra, t.extra_from) if t.extra_from < end and t.extra else None for t in (a, b)]
                is_equal = a.end_hash(LINK, size, end) == b.end_hash(LINK, size, end)
                assert is_equal == (active[0] == active[1])


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    own = module.hash_key
    monkeypatch.setattr(module, "hash_key", lambda key: hashed.append(1) or own(key))
    text = Text(range(64))
    for n in (16, 48, 64):
        text.block_hashes(LINK, 16, n)
    text.ids += range(32)
    text.block_hashes(LINK, 16)
    assert len(hashed) == 6


def test_what_keys_a_text_is_in_its_first_link() -> None:
    links = [
        Text([1], salt, extra).first_link(windows, model)
        for salt in ("", "a")
        for extra in (b"", b"a")
        for windows in (WINDOWS, WINDOWS + 1)
        for model in (b"", b"m")
    ]
    assert len(set(links)) == len(links)
