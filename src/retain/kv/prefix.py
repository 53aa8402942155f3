"""What requests leave behind: a radix tree over pages, so that nobody computes a prefix twice.

A node is a span of a text: whole pages, or, as a leaf, a beginning of one. It holds the pages of the M layers that see
everything, [M, G, n] (a page is `page_size` slots of one kv head of one layer), and, where sliding layers have to go on
from its end, those of the last positions in each of them. Keys are chained hashes: the link of a page names all tokens
up to its end, and what the first link begins with (the tenant's salt, how far layers see). Pages are shared by
reference: the tree is one more table that holds them. What is not known here: rows, slots, bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from retain.kv.node import Hit, Life, Node, Rings
from retain.kv.pool import Pool

Ints = NDArray[np.int32]


class Tree:
    """Of one pool."""

    def __init__(self, pool: Pool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self.roots: dict[bytes, Node] = {}
        self.mine = np.zeros(pool.n_pages, bool)  # pages that are held here
        self.clock = itertools.count(1)
        self.pins: dict[Node, float] = {}  # who stays, until when (seconds)
        self.evicted: Callable[[Node, int], None] | None = None  # told of a node whose pages from there on must go
        self.gone: deque[Life] = deque(maxlen=4096)  # of what was evicted last

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, first: bytes, tokens: Sequence[int], limit: int, sliding: bool) -> Hit | None:
        """As much of a text as there is, at most `limit` tokens; None where there is nothing.

        `sliding`: some layers slide, and their last positions must be there too.
        """
        root = self.roots.get(first)
        if root is None or limit < 1:
            return None
        S, text = self.page_size, np.asarray(tokens[:limit], np.int32)
        path, whole = self._walk(root, self.links(first, text))
        at, tails = whole * S, self._tails(path, whole, text)
        tail, same = tails[0] if tails else (None, 0)
        common = length = at + same
        rings = None
        if sliding:
            ends: list[tuple[int, Rings | None, Node | None]] = [
                (min(at, self._end(n)), n.rings, None) for n, _ in path
            ]
            ends += [(min(at + same, self._end(n)), n.rings, n) for n, same in tails]
            able = [(end, rings, n) for end, rings, n in ends if rings and rings.least <= end]
            length, rings, tail = max(able, key=lambda x: x[0], default=(0, None, None))
        if tail is path[-1][0]:
            path[-1] = tail, path[-1][1] + 1
        elif tail:
            path.append((tail, 1))
        self._touch([node for node, _ in path])
        for node, _ in path:
            node.found()
        pages = np.concatenate([node.pages[..., :n] for node, n in path], -1)
        return Hit(length, pages, rings, common)

    def _walk(self, root: Node, links: Sequence[bytes]) -> tuple[list[tuple[Node, int]], int]:
        """Nodes from the root on whose pages the text has, with how many of each; and their sum."""
        path, at = [(root, 0)], 0
        while at < len(links) and (child := path[-1][0].children.get(links[at])):
            n = 0
            while n < len(child.links) and at + n < len(links) and child.links[n] == links[at + n]:
                n += 1
            path.append((child, n))
            at += n
            if n < len(child.links):
                break
        return path, at

    def _tails(self, path: Sequence[tuple[Node, int]], whole: int, text: Ints) -> list[tuple[Node, int]]:
        """Who has some of the page that comes next, and how many of its tokens: who has most first."""
        S, (node, n), rest = self.page_size, path[-1], text[whole * self.page_size :]
        inside = n < len(node.links)
        nexts = [(node, node.tokens[n * S : (n + 1) * S])] if inside else [(c, c.tokens[:S]) for c in _kids(node)]
        found = [(c, same) for c, page in nexts if (same := _same(page, rest))]
        return sorted(found, key=lambda x: (-x[1], x[0].rings is None))

    def _end(self, node: Node) -> int:
        """Tokens of its text up to its end."""
        return node.begin * self.page_size + len(node.tokens)

    def _touch(self, nodes: Sequence[Node]) -> None:
        now = next(self.clock)
        for node in nodes:
            node.used = now

    def links(self, first: bytes, text: Ints) -> list[bytes]:
        """Of its whole pages, in order: they name them wherever they are."""
        S, link, links = self.page_size, first, []
        for i in range(0, len(text) - S + 1, S):
            links.append(link := _link(link, text[i : i + S]))
        return links

    # ---- keeping -------------------------------------------------------------------------------------------------

    def insert(self, first: bytes, tokens: Sequence[int], pages: Ints, rings: Rings | None = None) -> None:
        """Keep a text: pages [M, G, n] that hold its tokens, and of sliding layers those of its end.

        What is new is shared; `rings` are taken over, or given back.
        """
        S, text = self.page_size, np.asarray(tokens, np.int32)
        if first not in self.roots:
            self.roots[first] = Node(0, text[:0], [], pages[..., :0])
        links = self.links(first, text)
        path, whole = self._walk(self.roots[first], links)
        self._touch([n for n, _ in path])
        if not rings and whole * S + sum(same for _, same in self._tails(path, whole, text)[:1]) == len(text):
            return
        node, n = path[-1]
        if n < len(node.links):
            node = self._split(node, n)
        if whole < len(links):
            node = self._add(node, whole, text[whole * S : len(links) * S], links[whole:], pages)
        if len(rest := text[len(links) * S :]):
            link = _link(links[-1] if links else first, rest)
            node = node.children.get(link) or self._add(node, len(links), rest, [link], pages)
        if rings and node.rings:
            self._give(np.concatenate([p.ravel() for p in rings.pages]))
        elif rings:
            node.rings = rings
            self.mine[node.held] = True

    def _add(self, parent: Node, begin: int, tokens: Ints, links: list[bytes], pages: Ints) -> Node:
        node = Node(begin, tokens, links, pages[..., begin : begin + len(links)].copy(), None, parent)
        for kid in _kids(parent):  # who is a beginning of the new one is there twice
            if not kid.rings and _same(kid.tokens, tokens) == len(kid.tokens) < self.page_size:
                if kid in self.pins:
                    self.pins[node] = max(self.pins[kid], self.pins.get(node, 0.0))
                self._drop(kid)
        parent.children[links[0]] = node
        self.pool.share(node.pages.ravel())
        self.mine[node.pages] = True
        self._touch([node])
        return node

    def _split(self, node: Node, n: int) -> Node:
        """The first n pages of a node become its parent."""
        assert node.parent
        cut = n * self.page_size
        upper = Node(node.begin, node.tokens[:cut], node.links[:n], node.pages[..., :n], None, node.parent)
        upper.used = node.used
        if node in self.pins:
            self.pins[upper] = self.pins[node]
        node.parent.children[node.links[0]] = upper
        node.begin, node.tokens, node.links = node.begin + n, node.tokens[cut:], node.links[n:]
        node.pages, node.parent = node.pages[..., n:], upper
        upper.children[node.links[0]] = node
        return upper

    # ---- giving back ---------------------------------------------------------------------------------------------

    @property
    def spare(self) -> int:
        """Pages that nobody else holds, and that are not pinned."""
        self._unpin()
        return int(np.count_nonzero(self.pool.refs[self.mine] == 1)) - sum(map(self._frees, self.pins))

    def pin(self, first: bytes, tokens: Sequence[int], seconds: float) -> int:
        """What there is of a text stays for so long, unless somebody could not run at all. How many tokens that is."""
        text = np.asarray(tokens, np.int32)
        if first not in self.roots:
            return 0
        path, whole = self._walk(self.roots[first], self.links(first, text))
        tail = self._tails(path, whole, text)[:1]
        nodes = [node for node, _ in path[1:] + tail]
        self.pins |= {node: max(monotonic() + seconds, self.pins.get(node, 0.0)) for node in nodes}
        return whole * self.page_size + sum(same for _, same in tail)

    def unpin(self) -> bool:
        """Nothing is pinned any more. Whether anything was."""
        pinned, self.pins = bool(self.pins), {}
        return pinned

    def _unpin(self) -> None:
        """Forget pins whose time is over."""
        if self.pins:
            now = monotonic()
            self.pins = {node: until for node, until in self.pins.items() if until > now}

    def _frees(self, node: Node) -> int:
        return int(np.count_nonzero(self.pool.refs[node.held] == 1))

    def evict(self, n: int) -> None:
        """Give back n pages, or none where nobody else holds fewer: leaves, the longest unused first.

        Those whose pages are in use give nothing, and go only where that is enough: they stand between others and the
        end. Those that are pinned stay.
        """
        if n > self.spare:
            return
        n -= self._evict(n, in_use=False)
        if n > 0:
            self._evict(n, in_use=True)
        self.roots = {first: root for first, root in self.roots.items() if root.children}

    def _evict(self, n: int, in_use: bool) -> int:
        tie, had = itertools.count(), self.pool.free
        leaves = [(node.used, next(tie), node) for node in self._nodes() if not node.children and node not in self.pins]
        heapq.heapify(leaves)
        while (left := had + n - self.pool.free) > 0 and leaves:
            node = heapq.heappop(leaves)[2]
            parent, frees = node.parent, self._frees(node)
            if frees > left and not node.rings:  # its end is enough
                each = max(frees // len(node.links), 1)
                self._cut(node, max(len(node.links) - -(-left // each), 0), self.evicted)
            elif frees or in_use or not node.held.size:
                self._cut(node, 0, self.evicted)
            if parent and parent.parent and not parent.children and parent not in self.pins:
                heapq.heappush(leaves, (parent.used, next(tie), parent))
        return self.pool.free - had

    def clear(self) -> None:
        """Forget everything."""
        for node in list(self._nodes()):
            self._give(node.held)
        self.roots.clear()
        self.pins.clear()

    def _cut(self, node: Node, n: int, told: Callable[[Node, int], None] | None = None) -> None:
        """Keep the first n pages of a leaf."""
        if told and len(node.tokens) == len(node.links) * self.page_size:
            told(node, n)
        self.gone.append(node.life())
        if not n:
            return self._drop(node)
        self._give(node.pages[..., n:].ravel())
        node.tokens, node.links, node.pages = node.tokens[: n * self.page_size], node.links[:n], node.pages[..., :n]

    def _drop(self, node: Node) -> None:
        assert node.parent and not node.children
        del node.parent.children[node.links[0]]
        self.pins.pop(node, None)
        self._give(node.held)

    def _give(self, pages: Ints) -> None:
        self.mine[pages] = False
        self.pool.give(pages)

    def _nodes(self) -> Iterator[Node]:
        """All but the roots."""
        stack = [kid for root in self.roots.values() for kid in _kids(root)]
        while stack:
            node = stack.pop()
            yield node
            stack += _kids(node)

    @property
    def held(self) -> Ints:
        """All pages, for the accountant."""
        return np.concatenate([np.zeros(0, np.int32), *(n.held for n in self._nodes())])


def _kids(node: Node) -> list[Node]:
    return list(node.children.values())


def _same(a: Ints, b: Ints) -> int:
    """How many first tokens agree."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _link(before: bytes, tokens: Ints) -> bytes:
    return blake2b(before + tokens.tobytes(), digest_size=16).digest()
