"""The radix tree against a plain list of texts: 10,000 random operations, pages that remember what they hold."""

from __future__ import annotations

import random

import numpy as np
import pytest

from retain.kv.memory.pool import PagePool
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.prefix.config import parse as parse_prefix_config
from retain.kv.prefix.radix_tree import RadixTree

S, W = 4, 6  # page size, window of the sliding layer


class Rows:
    """What requests would do, with a text's beginning as the contents of a slot. One layer sees all, one slides."""

    def __init__(self, sliding: bool, pages: int = 60):
        self.pool, self.sliding = PagePool(pages), sliding
        self.tree = RadixTree(self.pool, S)
        self.pool.evict_callback = self.tree.evict
        self.holds: dict[int, list[tuple[int, ...]]] = {}
        self.kept: dict[bytes, list[tuple[int, ...]]] = {}

    def pages_of(self, text: list[int], first: int, n: int) -> np.ndarray:
        """Fresh pages that hold a text from page `first` on, [1, n]; with what is left of older texts behind it."""
        pages = self.pool.allocate(n)
        for i, page in enumerate(pages):
            old = self.holds.get(int(page), [(-1,)] * S)
            at = range((first + i) * S, (first + i + 1) * S)
            self.holds[int(page)] = [tuple(text[: p + 1]) if p < len(text) else o for p, o in zip(at, old, strict=True)]
        return pages[None]

    def ask(self, who: bytes, text: list[int], limit: int) -> int:
        """Look for a text; what is found must be its own."""
        hit = self.tree.match_prefix(who, text, limit, self.sliding)
        best = max((same(text[:limit], k) for k in self.kept.get(who, [])), default=0)
        if hit is None:
            assert not self.kept.get(who) or limit < 1 or best == 0 or self.evicted
            return 0
        assert hit.length <= hit.common_length <= min(limit, best)
        assert hit.pages.shape[-1] in (hit.common_length // S, -(-hit.common_length // S))
        for n in (hit.length, hit.common_length // S * S):
            self.holds_all(text, hit.pages[0, 0] if hit.pages.size else [], 0, range(n))
        if not self.sliding and not self.evicted:
            assert hit.length == best
        if self.sliding and hit.length:
            (first,), (pages,) = hit.sliding_windows.first_pages, hit.sliding_windows.pages
            self.holds_all(text, pages[0], first, range(max(hit.length - W + 1, 0), hit.length))
        return hit.length

    evicted = False

    def holds_all(self, text: list[int], pages: np.ndarray, first: int, positions: range) -> None:
        for p in positions:
            assert self.holds[int(pages[p // S - first])][p % S] == tuple(text[: p + 1])

    def keep(self, who: bytes, text: list[int]) -> None:
        """Compute it anew, without sharing, and leave it."""
        n = -(-len(text) // S)
        first = max(len(text) - W, 0) // S
        if not self.pool.ensure_free(n + (n - first if self.sliding else 0)):
            return
        pages, rings = self.pages_of(text, 0, n), None
        if self.sliding:
            least = first * S + W - 1 if first else 0
            rings = SlidingWindows((first,), (self.pages_of(text, first, n - first),), least)
        self.tree.insert(who, text, pages[None], rings)
        self.pool.free(pages.ravel())
        self.kept.setdefault(who, []).append(tuple(text))


def same(a: list[int], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("pages", [60, 4000])
@pytest.mark.parametrize("seed", range(5))
def test_random_operations(sliding: bool, pages: int, seed: int) -> None:
    rng, rows, found = random.Random(seed), Rows(sliding, pages), 0
    for _ in range(500):
        who = rng.choice([b"a", b"b"])
        text = [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.5:
            found += rows.ask(who, text, rng.randint(0, len(text)))
        elif rng.random() < 0.9:
            before = rows.pool.num_free
            rows.evicted |= before < 20
            rows.keep(who, text)
        else:
            n = rng.randint(1, 10)
            free, spare = rows.pool.num_free, rows.tree.num_evictable_pages
            assert spare == rows.pool.num_used == len(rows.tree.all_pages)
            rows.tree.evict(n)
            rows.evicted = True
            assert rows.pool.num_free - free >= (n if n <= spare else 0)
        rows.pool.check(rows.tree.all_pages)
    assert found > 50
    rows.tree.clear()
    assert rows.pool.num_used == 0


def test_without_eviction_everything_is_found() -> None:
    rng, rows = random.Random(3), Rows(False, 4000)
    for _ in range(150):
        text = [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 30))]
        rows.keep(b"a", text)
        rows.ask(b"a", text, len(text))
        rows.ask(b"a", [*text, 5], len(text) + 1)
    kept = rows.kept[b"a"]
    whole = {t[:n] for t in kept for n in range(S, len(t) + 1, S)}
    tails = {t for t in kept if len(t) % S and not any(u[: len(t)] == t for u in kept if len(u) > len(t))}
    assert rows.tree.num_evictable_pages == len(whole) + len(tails)  # what is alike is there once


def test_names_that_there_are() -> None:
    assert (
        parse_prefix_config("off") is None
        and parse_prefix_config("exact").keep == "all"
        and parse_prefix_config("exact:keep=prompt").keep == "prompt"
    )
    for wrong in ("on", "exact:keep=some", "off:keep=all", "exact:x=1", "exact:keep"):
        with pytest.raises(ValueError):
            parse_prefix_config(wrong)
