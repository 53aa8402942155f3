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

from retain.kv.memory.pool import PagePool
from retain.kv.memory.sliding_windows import SlidingWindows
from retain.kv.prefix.node import EvictionRecord, Node, PrefixMatch

Ints = NDArray[np.int32]


class RadixTree:
    """Of one pool."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self.roots: dict[bytes, Node] = {}
        self.owned_mask = np.zeros(pool.num_pages, bool)  # pages that are held here
        self.clock = itertools.count(1)
        self.pins: dict[Node, float] = {}  # who stays, until when (seconds)
        self.on_evict: Callable[[Node, int], None] | None = None  # told of a node whose pages from there on must go
        self.evictions: deque[EvictionRecord] = deque(maxlen=4096)  # of what was evicted last

    # ---- finding -------------------------------------------------------------------------------------------------

    def match_prefix(
        self, root_hash: bytes, tokens: Sequence[int], max_length: int, has_sliding_layers: bool
    ) -> PrefixMatch | None:
        """As much of a text as there is, at most `limit` tokens; None where there is nothing.

        `sliding`: some layers slide, and their last positions must be there too.
        """
        root = self.roots.get(root_hash)
        if root is None or max_length < 1:
            return None
        S, text = self.page_size, np.asarray(tokens[:max_length], np.int32)
        path, whole = self._walk(root, self.hash_blocks(root_hash, text))
        at, tails = whole * S, self._partial_matches(path, whole, text)
        tail, same = tails[0] if tails else (None, 0)
        common = length = at + same
        rings = None
        if has_sliding_layers:
            ends: list[tuple[int, SlidingWindows | None, Node | None]] = [
                (min(at, self._end_position(n)), n.sliding_windows, None) for n, _ in path
            ]
            ends += [(min(at + same, self._end_position(n)), n.sliding_windows, n) for n, same in tails]
            able = [(end, rings, n) for end, rings, n in ends if rings and rings.min_resume_position <= end]
            length, rings, tail = max(able, key=lambda x: x[0], default=(0, None, None))
        if tail is path[-1][0]:
            path[-1] = tail, path[-1][1] + 1
        elif tail:
            path.append((tail, 1))
        self._touch([node for node, _ in path])
        for node, _ in path:
            node.record_hit()
        pages = np.concatenate([node.pages[..., :n] for node, n in path], -1)
        return PrefixMatch(length, pages, rings, common)

    def _walk(self, root: Node, block_hashes: Sequence[bytes]) -> tuple[list[tuple[Node, int]], int]:
        """Nodes from the root on whose pages the text has, with how many of each; and their sum."""
        path, at = [(root, 0)], 0
        while at < len(block_hashes) and (child := path[-1][0].children.get(block_hashes[at])):
            n = 0
            while (
                n < len(child.block_hashes)
                and at + n < len(block_hashes)
                and child.block_hashes[n] == block_hashes[at + n]
            ):
                n += 1
            path.append((child, n))
            at += n
            if n < len(child.block_hashes):
                break
        return path, at

    def _partial_matches(
        self, path: Sequence[tuple[Node, int]], num_full_pages: int, tokens: Ints
    ) -> list[tuple[Node, int]]:
        """Who has some of the page that comes next, and how many of its tokens: who has most first."""
        S, (node, n), rest = self.page_size, path[-1], tokens[num_full_pages * self.page_size :]
        inside = n < len(node.block_hashes)
        nexts = [(node, node.tokens[n * S : (n + 1) * S])] if inside else [(c, c.tokens[:S]) for c in _children(node)]
        found = [(c, same) for c, page in nexts if (same := _common_prefix_length(page, rest))]
        return sorted(found, key=lambda x: (-x[1], x[0].sliding_windows is None))

    def _end_position(self, node: Node) -> int:
        """Tokens of its text up to its end."""
        return node.start_page * self.page_size + len(node.tokens)

    def _touch(self, nodes: Sequence[Node]) -> None:
        now = next(self.clock)
        for node in nodes:
            node.last_used = now

    def hash_blocks(self, root_hash: bytes, tokens: Ints) -> list[bytes]:
        """Of its whole pages, in order: they name them wherever they are."""
        S, link, links = self.page_size, root_hash, []
        for i in range(0, len(tokens) - S + 1, S):
            links.append(link := _hash_block(link, tokens[i : i + S]))
        return links

    # ---- keeping -------------------------------------------------------------------------------------------------

    def insert(
        self, root_hash: bytes, tokens: Sequence[int], pages: Ints, sliding_windows: SlidingWindows | None = None
    ) -> None:
        """Keep a text: pages [M, G, n] that hold its tokens, and of sliding layers those of its end.

        What is new is shared; `rings` are taken over, or given back.
        """
        S, text = self.page_size, np.asarray(tokens, np.int32)
        if root_hash not in self.roots:
            self.roots[root_hash] = Node(0, text[:0], [], pages[..., :0])
        links = self.hash_blocks(root_hash, text)
        path, whole = self._walk(self.roots[root_hash], links)
        self._touch([n for n, _ in path])
        if not sliding_windows and whole * S + sum(
            same for _, same in self._partial_matches(path, whole, text)[:1]
        ) == len(text):
            return
        node, n = path[-1]
        if n < len(node.block_hashes):
            node = self._split(node, n)
        if whole < len(links):
            node = self._add_child(node, whole, text[whole * S : len(links) * S], links[whole:], pages)
        if len(rest := text[len(links) * S :]):
            link = _hash_block(links[-1] if links else root_hash, rest)
            node = node.children.get(link) or self._add_child(node, len(links), rest, [link], pages)
        if sliding_windows and node.sliding_windows:
            self._free_pages(np.concatenate([p.ravel() for p in sliding_windows.pages]))
        elif sliding_windows:
            node.sliding_windows = sliding_windows
            self.owned_mask[node.all_pages] = True

    def _add_child(self, parent: Node, start_page: int, tokens: Ints, block_hashes: list[bytes], pages: Ints) -> Node:
        node = Node(
            start_page,
            tokens,
            block_hashes,
            pages[..., start_page : start_page + len(block_hashes)].copy(),
            None,
            parent,
        )
        for kid in _children(parent):  # who is a beginning of the new one is there twice
            if (
                not kid.sliding_windows
                and _common_prefix_length(kid.tokens, tokens) == len(kid.tokens) < self.page_size
            ):
                if kid in self.pins:
                    self.pins[node] = max(self.pins[kid], self.pins.get(node, 0.0))
                self._remove(kid)
        parent.children[block_hashes[0]] = node
        self.pool.incref(node.pages.ravel())
        self.owned_mask[node.pages] = True
        self._touch([node])
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """The first n pages of a node become its parent."""
        assert node.parent
        cut = num_pages * self.page_size
        upper = Node(
            node.start_page,
            node.tokens[:cut],
            node.block_hashes[:num_pages],
            node.pages[..., :num_pages],
            None,
            node.parent,
        )
        upper.last_used = node.last_used
        if node in self.pins:
            self.pins[upper] = self.pins[node]
        node.parent.children[node.block_hashes[0]] = upper
        node.start_page, node.tokens, node.block_hashes = (
            node.start_page + num_pages,
            node.tokens[cut:],
            node.block_hashes[num_pages:],
        )
        node.pages, node.parent = node.pages[..., num_pages:], upper
        upper.children[node.block_hashes[0]] = node
        return upper

    # ---- giving back ---------------------------------------------------------------------------------------------

    @property
    def num_evictable_pages(self) -> int:
        """Pages that nobody else holds, and that are not pinned."""
        self._expire_pins()
        return int(np.count_nonzero(self.pool.ref_counts[self.owned_mask] == 1)) - sum(
            map(self._num_exclusive_pages, self.pins)
        )

    def pin(self, root_hash: bytes, tokens: Sequence[int], seconds: float) -> int:
        """What there is of a text stays for so long, unless somebody could not run at all. How many tokens that is."""
        text = np.asarray(tokens, np.int32)
        if root_hash not in self.roots:
            return 0
        path, whole = self._walk(self.roots[root_hash], self.hash_blocks(root_hash, text))
        tail = self._partial_matches(path, whole, text)[:1]
        nodes = [node for node, _ in path[1:] + tail]
        self.pins |= {node: max(monotonic() + seconds, self.pins.get(node, 0.0)) for node in nodes}
        return whole * self.page_size + sum(same for _, same in tail)

    def unpin_all(self) -> bool:
        """Nothing is pinned any more. Whether anything was."""
        pinned, self.pins = bool(self.pins), {}
        return pinned

    def _expire_pins(self) -> None:
        """Forget pins whose time is over."""
        if self.pins:
            now = monotonic()
            self.pins = {node: until for node, until in self.pins.items() if until > now}

    def _num_exclusive_pages(self, node: Node) -> int:
        return int(np.count_nonzero(self.pool.ref_counts[node.all_pages] == 1))

    def evict(self, num_pages: int) -> None:
        """Give back n pages, or none where nobody else holds fewer: leaves, the longest unused first.

        Those whose pages are in use give nothing, and go only where that is enough: they stand between others and the
        end. Those that are pinned stay.
        """
        if num_pages > self.num_evictable_pages:
            return
        num_pages -= self._evict_leaves(num_pages, in_use=False)
        if num_pages > 0:
            self._evict_leaves(num_pages, in_use=True)
        self.roots = {first: root for first, root in self.roots.items() if root.children}

    def _evict_leaves(self, num_pages: int, in_use: bool) -> int:
        tie, had = itertools.count(), self.pool.num_free
        leaves = [
            (node.last_used, next(tie), node)
            for node in self._iter_nodes()
            if not node.children and node not in self.pins
        ]
        heapq.heapify(leaves)
        while (left := had + num_pages - self.pool.num_free) > 0 and leaves:
            node = heapq.heappop(leaves)[2]
            parent, frees = node.parent, self._num_exclusive_pages(node)
            if frees > left and not node.sliding_windows:  # its end is enough
                each = max(frees // len(node.block_hashes), 1)
                self._truncate(node, max(len(node.block_hashes) - -(-left // each), 0), self.on_evict)
            elif frees or in_use or not node.all_pages.size:
                self._truncate(node, 0, self.on_evict)
            if parent and parent.parent and not parent.children and parent not in self.pins:
                heapq.heappush(leaves, (parent.last_used, next(tie), parent))
        return self.pool.num_free - had

    def clear(self) -> None:
        """Forget everything."""
        for node in list(self._iter_nodes()):
            self._free_pages(node.all_pages)
        self.roots.clear()
        self.pins.clear()

    def _truncate(self, node: Node, num_pages: int, on_evict: Callable[[Node, int], None] | None = None) -> None:
        """Keep the first n pages of a leaf."""
        if on_evict and len(node.tokens) == len(node.block_hashes) * self.page_size:
            on_evict(node, num_pages)
        self.evictions.append(node.to_eviction_record())
        if not num_pages:
            return self._remove(node)
        self._free_pages(node.pages[..., num_pages:].ravel())
        node.tokens, node.block_hashes, node.pages = (
            node.tokens[: num_pages * self.page_size],
            node.block_hashes[:num_pages],
            node.pages[..., :num_pages],
        )

    def _remove(self, node: Node) -> None:
        assert node.parent and not node.children
        del node.parent.children[node.block_hashes[0]]
        self.pins.pop(node, None)
        self._free_pages(node.all_pages)

    def _free_pages(self, pages: Ints) -> None:
        self.owned_mask[pages] = False
        self.pool.free(pages)

    def _iter_nodes(self) -> Iterator[Node]:
        """All but the roots."""
        stack = [kid for root in self.roots.values() for kid in _children(root)]
        while stack:
            node = stack.pop()
            yield node
            stack += _children(node)

    @property
    def all_pages(self) -> Ints:
        """All pages, for the accountant."""
        return np.concatenate([np.zeros(0, np.int32), *(n.all_pages for n in self._iter_nodes())])


def _children(node: Node) -> list[Node]:
    return list(node.children.values())


def _common_prefix_length(a: Ints, b: Ints) -> int:
    """How many first tokens agree."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _hash_block(parent_hash: bytes, tokens: Ints) -> bytes:
    return blake2b(parent_hash + tokens.tobytes(), digest_size=16).digest()
