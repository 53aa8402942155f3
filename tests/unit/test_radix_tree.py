"""The radix tree against a plain list of texts: random operations on pages whose content is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from retain.kv.checkpoints.windows_and_states import KEY, WindowsAndStates
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.config import parse as parse_prefix_config
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.text import Text
from retain.types import Ints
from tests.helpers.marks import slow

S, W = 4, 6  # page size, window of the sliding layer


Content = list[int | tuple[int, bytes, int]]


def content_of(text: Text) -> Content:
    """Return what decides the K and V of each token: it, and from a position on what keys it there."""
    keys = text.extra, text.extra_from
    return [t if i < text.extra_from or not text.extra else (t, *keys) for i, t in enumerate(text.ids)]


class CachedTexts:
    """A tree with the texts that were inserted, and the content of every page: a slot holds its text up to there.

    The model has one layer without a window, and one that slides if `sliding`.
    """

    def __init__(self, sliding: bool, num_pages: int = 60):
        self.pool, self.sliding = PagePool(num_pages), sliding
        self.tree = RadixTree(self.pool, S)
        self.pool.evict_callback = self.tree.evict
        self.slots: dict[int, list[tuple[object, ...]]] = {}  # by page
        self.texts: dict[bytes, list[Content]] = {}  # by root hash
        self.may_have_evicted = False

    def allocate(self, text: Content, first_page: int, n: int) -> Ints:
        """Allocate pages that hold a text from a page on, [1, n]; old content stays behind its end."""
        pages = self.pool.allocate(n)
        for i, page in enumerate(pages):
            old = self.slots.get(int(page), [(-1,)] * S)
            places = range((first_page + i) * S, (first_page + i + 1) * S)
            pairs = zip(places, old, strict=True)
            self.slots[int(page)] = [tuple(text[: p + 1]) if p < len(text) else o for p, o in pairs]
        return pages[None]

    def insert(self, root: bytes, inserted: Text) -> None:
        """Insert a text whose pages were computed without sharing."""
        text = content_of(inserted)
        n = -(-len(text) // S)
        first = max(len(text) - W, 0) // S
        if not self.pool.ensure_free(n + (n - first if self.sliding else 0)):
            return
        pages, checkpoints = self.allocate(text, 0, n), {}
        if self.sliding:
            resumes_from = first * S + W - 1 if first else 0
            held = self.allocate(text, first, n - first)
            checkpoints[KEY.name] = WindowsAndStates(len(text), (first,), (held,), resumes_from, (0,), (0,))
        self.tree.insert(root, inserted, len(text), pages, checkpoints, 0, frozenset(checkpoints))
        self.pool.free(pages.ravel())
        self.texts.setdefault(root, []).append(text)

    def match(self, root: bytes, asked: Text, limit: int) -> int:
        """Match a text, and check that the pages hold it. Returns the length of the match."""
        text = content_of(asked)
        match = self.tree.match_prefix(root, asked, limit)
        texts = self.texts.get(root, [])
        longest = max((common_length(text[:limit], t) for t in texts), default=0)
        assert match.length <= match.common_length <= min(limit, longest)
        assert match.pages.shape[-1] == -(-match.length // S)
        self.check_content(text, match.pages[0] if match.pages.size else np.zeros(0, np.int32), 0, range(match.length))
        if not self.may_have_evicted:
            assert match.length == longest
        found = 0
        for windows, end in match.checkpoints(KEY.name):
            assert isinstance(windows, WindowsAndStates)
            (first,), (pages,) = windows.first_pages, windows.pages
            self.check_content(text, pages[0], first, range(max(end.reach - W + 1, 0), end.reach))
            found = max(found, end.reach)
        used = [(end.node, KEY.name) for _, end in match.checkpoints(KEY.name) if end.reach == found]
        self.tree.touch(match.nodes, used[:1])
        return found if self.sliding else match.length

    def check_content(self, text: Content, pages: Ints, first_page: int, places: range) -> None:
        for p in places:
            assert self.slots[int(pages[p // S - first_page])][p % S] == tuple(text[: p + 1])


def common_length(a: Content, b: Content) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def random_text(rng: random.Random, is_keyed: bool = False) -> Text:
    tokens = [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 30))]
    extra = rng.choice((b"", b"x", b"y")) if is_keyed else b""
    return Text(tokens, "", extra, rng.randint(1, len(tokens)) if extra else 0)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("num_pages", [60, 4000])
@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4)])
def test_random_operations_match_what_was_inserted(sliding: bool, num_pages: int, is_keyed: bool, seed: int) -> None:
    """Also where something keys texts from some position on: then they share what lies before."""
    rng, texts, num_matched = random.Random(seed), CachedTexts(sliding, num_pages), 0
    for _ in range(500):
        root, text = rng.choice([b"a", b"b"]), random_text(rng, is_keyed)
        if rng.random() < 0.5:
            num_matched += texts.match(root, text, rng.randint(0, len(text)))
        elif rng.random() < 0.9:
            texts.may_have_evicted |= texts.pool.num_free < 20
            texts.insert(root, text)
        else:
            n = rng.randint(1, 10)
            num_free, num_evictable = texts.pool.num_free, texts.tree.num_evictable_pages
            assert num_evictable == texts.pool.num_used == len(texts.tree.all_pages)
            texts.tree.evict(n)
            texts.may_have_evicted = True
            assert texts.pool.num_free - num_free >= (n if n <= num_evictable else 0)
        texts.pool.check(texts.tree.all_pages)
        texts.tree.check()
    assert num_matched > 50
    texts.tree.clear()
    assert texts.pool.num_used == 0


@pytest.mark.parametrize("num_heads", [1, 3])
def test_a_text_ends_before_the_page_that_a_row_takes(num_heads: int) -> None:
    """The blocks before it stay cached, and what goes on behind it does not."""
    for block in range(5):
        pool = PagePool(60)
        tree = RadixTree(pool, S)
        text = list(range(5 * S))
        pages = pool.allocate(5 * num_heads).reshape(num_heads, 5)
        tree.insert(b"a", Text(text), len(text), pages)
        tree.insert(b"a", Text([*text[: 4 * S], 99]), 4 * S + 1, pages)  # so that texts part in it
        pool.free(pages.ravel())
        tree.evict_holders(pages[-1:, block])
        assert tree.match_prefix(b"a", Text(text), len(text)).length == block * S
        pool.check(tree.all_pages)


@pytest.mark.parametrize("is_keyed", [False, True])
def test_equal_pages_are_cached_once(is_keyed: bool) -> None:
    """Without eviction every inserted text is found, and takes no page that another one has."""
    rng, texts = random.Random(3), CachedTexts(False, 4000)
    for _ in range(150):
        text = random_text(rng, is_keyed)
        texts.insert(b"a", text)
        texts.match(b"a", text, len(text))
        texts.match(b"a", Text([*text.ids, 5], "", text.extra, text.extra_from), len(text) + 1)
    inserted = [tuple(text) for text in texts.texts[b"a"]]
    full_pages = {t[:n] for t in inserted for n in range(S, len(t) + 1, S)}
    partial = {t for t in inserted if len(t) % S}
    tails = {t for t in partial if not any(u[: len(t)] == t for u in inserted if len(u) > len(t))}
    assert texts.tree.num_evictable_pages == len(full_pages) + len(tails)


def test_prefix_cache_specs() -> None:
    assert parse_prefix_config("off") is None
    exact, prompts = parse_prefix_config("exact"), parse_prefix_config("exact:keep=prompt")
    assert exact and exact.keep == "all"
    assert prompts and prompts.keep == "prompt"


@pytest.mark.parametrize("spec", ["on", "exact:keep=some", "off:keep=all", "exact:x=1", "exact:keep"])
def test_a_wrong_prefix_cache_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError):
        parse_prefix_config(spec)
