"""Rows that begin with what the prefix tree has, and leave to it what they computed.

Whole pages are shared, a page of which only a part is wanted is copied, and so is what will be written over: the
windows of sliding layers, and everything of a row that forgets. Such a row leaves nothing, for its pages soon hold a
choice of tokens. Keys and values depend on how far layers see, so that is part of the first link. What is not known
here: who is scheduled, how the tree finds and evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retain.config import choice, one_of, options
from retain.kernels import NO_WINDOW
from retain.kv.budget import Budget
from retain.kv.policies import Policy
from retain.kv.pool import index
from retain.kv.prefix import Hit, Rings, Tree

if TYPE_CHECKING:
    from retain.kv.cache import Cache

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Prefix:
    """What is kept of a request. Raises ValueError."""

    keep: str = "all"  # or prompt: no answers

    def __post_init__(self) -> None:
        one_of("keep", self.keep, "all", "prompt")


def parse(text: str) -> Prefix | None:
    """`exact`, `exact:keep=prompt`, or `off`, which is None. Raises ValueError."""
    name, given = choice(text)
    if name == "off" and not given:
        return None
    if name != "exact":
        raise ValueError(f"unknown prefix {text!r}: choose exact, exact:keep=prompt or off")
    found: Prefix = options(Prefix, name, given)
    return found


class Reuse:
    """Of one cache. `salt` is a tenant's: texts of different salts never meet."""

    def __init__(self, cache: Cache, chosen: Prefix):
        self.cache, self.chosen, self.tree = cache, chosen, Tree(cache.pool, cache.page_size)

    def find(self, policy: Policy, tokens: Sequence[int], limit: int, salt: str) -> Hit | None:
        """What a row under this policy could begin with: at most `limit` tokens."""
        if isinstance(policy, Budget):
            limit = min(limit, _unseen(policy))
        windows = self.cache.windows(policy)
        return self.tree.find(_first(salt, windows), tokens, limit, bool((windows < NO_WINDOW).any()))

    def pin(self, policy: Policy, tokens: Sequence[int], salt: str, seconds: float) -> int:
        """What there is of a text stays for so long. How many tokens that is."""
        return self.tree.pin(_first(salt, self.cache.windows(policy)), tokens, seconds)

    def covered(self, policy: Policy, tokens: Sequence[int], limit: int, salt: str) -> int:
        """Pages of what such a row would need that other rows hold already."""
        hit = None if isinstance(policy, Budget) else self.find(policy, tokens, limit, salt)
        if not hit:
            return 0
        shared = hit.pages[..., : hit.length // self.cache.page_size]
        return int(np.count_nonzero(self.cache.pool.refs[shared] > 1))

    def resume(self, row: int, policy: Policy, tokens: Sequence[int], limit: int, salt: str) -> tuple[int, int]:
        """Begin a row that owns nothing yet. How many tokens are computed; and where more could have been shared, had
        somebody left the windows of its sliding layers there (0: nowhere).
        """
        hit = self.find(policy, tokens, limit, salt)
        if not hit:
            return 0, 0
        S, copies = self.cache.page_size, isinstance(policy, Budget)
        mark = 0 if copies else hit.common // S * S  # who copies leaves nothing
        mark = mark if mark > hit.length else 0
        return (hit.length if hit.length and self._adopt(row, hit, copies) else 0), mark

    def _adopt(self, row: int, hit: Hit, copies: bool) -> bool:
        """Put its pages into the row's tables. False where there are no pages for copies."""
        c, S, end = self.cache, self.cache.page_size, hit.length
        sees_all, slide = c.window[row] == NO_WINDOW, np.flatnonzero(c.window[row] < NO_WINDOW)
        shared = 0 if copies else end // S
        here: list[tuple[int, int, Ints]] = []  # layer, first page of the text, pages [G, n] to be copied
        for layer, pages in zip(np.flatnonzero(sees_all).tolist(), hit.pages, strict=True):
            here.append((layer, shared, pages[:, shared:]))
        for i, layer in enumerate(slide.tolist()):
            assert hit.rings
            first, last = max(end - int(c.window[row, layer]) + 1, 0) // S, -(-end // S)
            begin = hit.rings.first[i]
            here.append((layer, first, hit.rings.pages[i][:, first - begin : last - begin]))
        src = np.concatenate([p.ravel() for _, _, p in here])
        kept = hit.pages[..., :shared].ravel()
        c.pool.share(np.concatenate([kept, src]))  # nobody may evict them now
        if not c.pool.room(len(src)):
            c.pool.give(np.concatenate([kept, src]))
            return False
        dst = c.pool.take(len(src))
        c.backend.copy(c.kv, index(src), index(dst))
        pos = c.kv.pos[index(dst)]
        c.kv.pos[index(dst)] = pos.masked_fill_(pos >= end, -1)
        c.kv.mass[index(dst)] = 0
        c.pool.give(src)
        c.pages[row, sees_all, :, :shared] = hit.pages[..., :shared]
        c.base[row, slide] = [first * S for _, first, _ in here[len(hit.pages) :]]
        for (layer, first, pages), copied in zip(
            here, np.split(dst, np.cumsum([p.size for _, _, p in here])[:-1]), strict=True
        ):
            at = first - int(c.base[row, layer]) // S
            end_of = at + pages.shape[1]
            c.pages[row, layer, :, at:end_of] = copied.reshape(pages.shape)
            c.counts[row, layer] = end_of
        c.peaks[row] = c.counts[row]
        c.paid[row] = end
        return True

    def leave(
        self, row: int, policy: Policy, tokens: Sequence[int], prompt: int, salt: str, goes_on: bool = False
    ) -> None:
        """Keep what a row has computed: these tokens, of which the first `prompt` were asked.

        `goes_on`: it will write more, so only whole pages are shared.
        """
        c, S = self.cache, self.cache.page_size
        end = len(tokens) if self.chosen.keep == "all" else min(len(tokens), prompt)
        end = end // S * S if goes_on else end
        if not end or row in c.keepers:
            return
        sees_all, slide = c.window[row] == NO_WINDOW, np.flatnonzero(c.window[row] < NO_WINDOW)
        rings = self._rings(row, slide, end, goes_on) if len(slide) else None
        if rings or not len(slide):
            pages = c.pages[row, sees_all, :, : -(-end // S)]
            self.tree.insert(_first(salt, c.windows(policy)), tokens[:end], pages, rings)

    def _rings(self, row: int, slide: NDArray[np.intp], end: int, goes_on: bool) -> Rings | None:
        """The pages of the layers that slide, as they are before position `end`. None where they are no more."""
        c, S, last = self.cache, self.cache.page_size, -(-end // self.cache.page_size)
        firsts, found, least = [], [], 0
        for layer in slide:
            W, capacity, base = (int(x[row, layer]) for x in (c.window, c.capacity, c.base))
            first = max((end - W) // S, last - capacity // S, base // S, 0)
            places = (np.arange(first, last) * S - base) % capacity // S
            pages = c.pages[row, layer][:, places]
            firsts.append(first)
            found.append(pages)
            # Who came later may have written over the oldest; all heads of a ring hold the same positions.
            here = np.arange(first * S, end)
            there = c.kv.pos[index(pages[0])].flatten()[: len(here)].numpy()
            lost = here[there != here]
            begin = int(lost[-1]) + 1 if len(lost) else first * S
            least = max(least, begin + W - 1 if begin else 0)
        if least > end:
            return None
        pages = np.concatenate([p.ravel() for p in found])
        if not goes_on:
            c.pool.share(pages)
            return Rings(tuple(firsts), tuple(found), least)
        if not c.pool.room(len(pages)):
            return None
        copies = c.pool.take(len(pages))
        c.backend.copy(c.kv, index(pages), index(copies))
        each = np.split(copies, np.cumsum([p.size for p in found])[:-1])
        return Rings(tuple(firsts), tuple(x.reshape(p.shape) for x, p in zip(each, found, strict=True)), least)


def _first(salt: str, windows: Ints) -> bytes:
    """What the first link of a text begins with."""
    return blake2b(salt.encode(errors="surrogatepass") + b"\0" + windows.tobytes(), digest_size=16).digest()


def _unseen(policy: Budget) -> int:
    """Tokens of the prompt, the first ones, that need no query: they leave nothing on slots, and are there at once."""
    if policy.prefill != "exact":
        return 0
    watch = policy.watch(np.arange(policy.prompt, dtype=np.int32), 1)
    seen = np.flatnonzero(watch.weights).tolist() if watch else []
    return min([*seen[:1], policy.prompt - 1])
