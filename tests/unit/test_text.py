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
