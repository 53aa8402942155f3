"""Rows that begin with what the prefix tree has, and leave to it what they computed.

Whole pages are shared, a page of which only a part is wanted is copied, and so is what will be written over: the
windows of sliding layers, and everything of a row that forgets. Such a row leaves nothing, for its pages soon hold a
choice of tokens. Keys and values depend on how far layers see, so that is part of the first link. What is not known
here: who is scheduled, how the tree finds and evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.config import choice, one_of, options
from retain.kernels import NO_WINDOW
from retain.kv.begin import SPARE, Beginning, adopt, cut
from retain.kv.budget import Budget
from retain.kv.fetch import Fetch, Job
from retain.kv.node import Hit, Rings
from retain.kv.policies import Policy
from retain.kv.prefix import Tree
from retain.kv.selective import Selective
from retain.kv.sleep import Sleep

if TYPE_CHECKING:
    from retain.kv.cache import Cache

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Prefix:
    """What is kept of a request. Raises ValueError."""

    keep: str = "all"  # or prompt: no answers

    def __post_init__(self) -> None:
        one_of("keep", self.keep, "all", "prompt")


@dataclass(frozen=True)
class Important(Prefix):
    """Of what comes from tiers only so much is loaded, what is looked at most. Raises ValueError."""

    ratio: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"important: ratio is above 0 and at most 1, not {self.ratio:g}")


def parse(text: str) -> Prefix | None:
    """`exact`, `exact:keep=prompt`, `important:ratio=0.25`, or `off`, which is None. Raises ValueError."""
    name, given = choice(text)
    if name == "off" and not given:
        return None
    if name not in ("exact", "important"):
        raise ValueError(f"unknown prefix {text!r}: choose exact, exact:keep=prompt, important:ratio=0.25 or off")
    found: Prefix = options(Important if name == "important" else Prefix, name, given)
    return found


class Reuse:
    """Of one cache. `salt` is a tenant's: texts of different salts never meet."""

    def __init__(self, cache: Cache, chosen: Prefix):
        self.cache, self.chosen, self.tree = cache, chosen, Tree(cache.pool, cache.page_size)
        self.sleep: Sleep | None = None
        self.fetches: dict[int, Fetch] = {}  # of rows that wait for pages
        self.thin = set[int]()  # rows that were born evicted: they leave nothing
        self.selective: type[Selective] = Selective
        self.resumed = 0  # tokens that rows began with

    def _first(self, salt: str, windows: Ints) -> bytes:
        """What the first link of a text begins with."""
        brand = self.sleep.brand if self.sleep else b""
        text = brand + b"\0" + salt.encode(errors="surrogatepass") + b"\0" + windows.tobytes()
        return blake2b(text, digest_size=16).digest()

    def below(self, sleep: Sleep) -> None:
        """From now on there are tiers below the pool."""
        self.sleep = sleep
        self.tree.evicted = lambda node, n: sleep.evicted(
            node.links[n:], node.begin + n, node.pages[..., n:], node.rings
        )

    def close(self) -> None:
        """There are no tiers any more; and nothing is in the tree, whose links named them."""
        if self.sleep:
            self.tree.evicted = None
            self.sleep.close()
            self.tree.clear()
            self.sleep = None

    def find(self, policy: Policy, tokens: Sequence[int], limit: int, salt: str) -> Hit | None:
        """What a row under this policy could begin with: at most `limit` tokens."""
        if isinstance(policy, Budget):
            limit = min(limit, _unseen(policy))
        windows = self.cache.windows(policy)
        return self.tree.find(self._first(salt, windows), tokens, limit, bool((windows < NO_WINDOW).any()))

    def pin(self, policy: Policy, tokens: Sequence[int], salt: str, seconds: float) -> int:
        """What there is of a text stays for so long. How many tokens that is."""
        return self.tree.pin(self._first(salt, self.cache.windows(policy)), tokens, seconds)

    def covered(self, policy: Policy, tokens: Sequence[int], limit: int, salt: str) -> int:
        """Pages of what such a row would need that other rows hold already."""
        hit = None if isinstance(policy, Budget) else self.find(policy, tokens, limit, salt)
        if not hit:
            return 0
        shared = hit.pages[..., : hit.length // self.cache.page_size]
        return int(np.count_nonzero(self.cache.pool.refs[shared] > 1))

    def resume(
        self, row: int, policy: Policy, tokens: Sequence[int], limit: int, salt: str, again: bool = False
    ) -> tuple[int, int]:
        """Begin a row that owns nothing yet. How many tokens are computed; and where more could have been shared, had
        somebody left the windows of its sliding layers there (0: nowhere).

        What sleeps in tiers is on its way when this returns: see `awaited`. Who begins `again`, having been preempted,
        chooses nothing: it could take more pages than computing would, and has to fit.
        """
        S, copies = self.cache.page_size, isinstance(policy, Budget)
        hit = self.find(policy, tokens, limit, salt)
        chooses = self.sleep is not None and self.sleep.probes is not None
        begin = None if again and chooses else self._asleep(policy, tokens, limit, salt, hit)
        if hit and not begin:
            begin = Beginning(hit.length, hit.pages[..., : -(-hit.length // S)], hit.rings)
        length = begin.length if begin else 0
        mark = hit.common // S * S if hit and not copies else 0  # who copies leaves nothing
        mark = mark if mark > length else 0
        jobs = adopt(self.cache, row, begin, copies) if begin and length else None
        if jobs is not None and self.sleep and begin and (begin.parts or begin.windows):
            self.fetches[row] = self._choose(row, begin, jobs) if begin.selective else Fetch(self.sleep, jobs)
            self.sleep.wake(begin.parts, begin.windows)
        self.resumed += 0 if jobs is None else length
        return (0 if jobs is None else length), mark

    def _asleep(
        self, policy: Policy, tokens: Sequence[int], limit: int, salt: str, hit: Hit | None
    ) -> Beginning | None:
        """A beginning of whole pages that is longer than what the tree has, where tiers have the rest of it, and it is
        sooner read than computed.
        """
        S, windows = self.cache.page_size, self.cache.windows(policy)
        if not self.sleep or (self.sleep.probes and isinstance(policy, Budget)):
            return None  # who forgets would choose among what was chosen
        if isinstance(policy, Budget):
            limit = min(limit, _unseen(policy))
        keys = self.tree.links(self._first(salt, windows), np.asarray(tokens[: max(limit, 0)], np.int32))
        have, length = (hit.common // S, hit.length) if hit else (0, 0)
        sees_all = int(np.count_nonzero(windows == NO_WINDOW))
        parts = self.sleep.find(keys[have:]) if sees_all else []
        upto = have + sum(p.end - p.begin for p in parts) if sees_all else len(keys)
        rings = None
        if sees_all < len(windows):
            there = ((i, self.sleep.windows(keys[i - 1])) for i in range(upto, length // S, -1))
            upto, rings = next(((i, w) for i, w in there if w and w.span.least <= i * S), (0, None))
            parts = self.sleep.find(keys[have:upto]) if sees_all else []
        if upto * S <= length:
            return None
        if self.sleep.probes and sum(len(p.span.keys) - p.end + p.begin for p in parts) > SPARE:
            return None
        if not self.sleep.worth_it([*parts, rings] if rings else parts, upto * S - length):
            return None
        none = np.zeros((sees_all, self.cache.shape.kv_heads, 0), np.int32)
        pages, selective = hit.pages[..., : min(have, upto)] if hit else none, bool(self.sleep.probes and parts)
        return Beginning(upto * S, pages, None, parts, rings, selective)

    def _choose(self, row: int, begin: Beginning, jobs: dict[int, list[Job]]) -> Fetch:
        """A row that will have only what is important to it. Its table is shorter than its text is."""
        c, S, had = self.cache, self.cache.page_size, begin.pages.shape[-1]
        assert self.sleep and self.sleep.probes
        layers = np.flatnonzero(c.window[row] == NO_WINDOW)
        upto = had + sum(len(p.span.keys) for p in begin.parts)
        c.base[row, layers] = begin.length - upto * S
        self.thin.add(row)
        c.mirror.touch(row, dense=False)
        pages = c.pages[row, layers, :, had:upto].copy()

        def keep(layer: int, n: int) -> None:
            cut(c, row, layer, had + n, upto)

        return self.selective(*(self.sleep, self.sleep.probes, begin.parts, layers.tolist(), pages, keep, jobs))

    # ---- what is on its way --------------------------------------------------------------------------------------

    def awaited(self, rows: Sequence[int], starts: Sequence[int]) -> Callable[[int, Tensor], None] | None:
        """What who computes calls before a layer looks; None: nothing is on its way to these rows.

        Fresh queries starts[b] : starts[b + 1] are those of rows[b].
        """
        ends = zip(rows, starts, starts[1:], strict=False)
        fetches = [(f, begin, end) for row, begin, end in ends if (f := self.fetches.get(row))]

        def before(layer: int, q: Tensor) -> None:
            for fetch, begin, end in fetches:
                fetch.wait(layer, q[begin:end])
            self.cache.mirror.push()  # what was chosen has shortened tables

        return before if fetches else None

    def arrived(self, row: int | None) -> bool:
        """After a step: whether everything has come that the row waited for. If not, it is good for nothing."""
        fetch = None if row is None else self.fetches.pop(row, None)
        if fetch and not fetch.done():
            return False
        if fetch and row not in self.cache.keepers and row not in self.thin:
            for store, span in fetch.woken:
                if not store.replica and not span.firsts:
                    store.drop(span)  # it will be in the tree
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that waited for nothing took so long."""
        if self.sleep and tokens >= self.cache.page_size:
            self.sleep.rates.computed(tokens, seconds)

    def stop(self, row: int) -> None:
        """Nothing comes into its pages any more."""
        self.thin.discard(row)
        if fetch := self.fetches.pop(row, None):
            fetch.stop()

    # ---- leaving -------------------------------------------------------------------------------------------------

    def leave(
        self, row: int, policy: Policy, tokens: Sequence[int], prompt: int, salt: str, goes_on: bool = False
    ) -> None:
        """Keep what a row has computed: these tokens, of which the first `prompt` were asked.

        `goes_on`: it will write more, so only whole pages are shared.
        """
        c, S = self.cache, self.cache.page_size
        end = len(tokens) if self.chosen.keep == "all" else min(len(tokens), prompt)
        end = end // S * S if goes_on else end
        if not end or row in c.keepers or row in self.fetches or row in self.thin:
            return
        sees_all, slide = c.window[row] == NO_WINDOW, np.flatnonzero(c.window[row] < NO_WINDOW)
        rings = self._rings(row, slide, end, goes_on) if len(slide) else None
        if rings or not len(slide):
            pages = c.pages[row, sees_all, :, : -(-end // S)]
            first = self._first(salt, c.windows(policy))
            if self.sleep:
                links = self.tree.links(first, np.asarray(tokens[:end], np.int32))
                self.sleep.born(links, 0, pages[..., : len(links)], rings if end % S == 0 else None)
            self.tree.insert(first, tokens[:end], pages, rings)

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
            there = c.kv.pos[c.kv.index(pages[0])].flatten()[: len(here)].cpu().numpy()
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
        c.backend.copy(c.kv, c.kv.index(pages), c.kv.index(copies))
        each = np.split(copies, np.cumsum([p.size for p in found])[:-1])
        return Rings(tuple(firsts), tuple(x.reshape(p.shape) for x, p in zip(each, found, strict=True)), least)


def _unseen(policy: Budget) -> int:
    """Tokens of the prompt, the first ones, that need no query: they leave nothing on slots, and are there at once."""
    if policy.prefill != "exact":
        return 0
    watch = policy.watch(np.arange(policy.prompt, dtype=np.int32), 1)
    seen = np.flatnonzero(watch.weights).tolist() if watch else []
    return min([*seen[:1], policy.prompt - 1])
