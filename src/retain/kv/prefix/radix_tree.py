"""The radix tree: pages of computed texts, so that no prefix is computed twice.

A node is a span of a text: whole blocks (here called pages), or, as a leaf, the beginning of one. It holds the pages of
all layers without a window, [K, n] (kv/memory/block_layout.py). Where a text needs more than these to go on, a node may
hold a snapshot of that at its end. Nodes are found by chained block hashes, which cover all tokens up to their end and
the root hash (the tenant's salt, the model, the windows). The tree shares pages by reference count, like one more block
table; pages of several snapshots are held by each of them.

Snapshots stay at the ends of texts, where texts part, and on a ladder inside long ones. What is evicted first is told
by the tokens that it saves, per page, and by how long ago it was used (eviction_order.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from retain.kv.memory.pool import PagePool
from retain.kv.memory.snapshot import Snapshot
from retain.kv.prefix.events import PrefixObserver, StoredPages
from retain.kv.prefix.eviction_order import candidates, leaf_value
from retain.kv.prefix.history import PrefixHistory
from retain.kv.prefix.node import EvictionRecord, Node, PrefixMatch
from retain.kv.prefix.pins import Pins
from retain.kv.prefix.snapshot_ladder import SnapshotLadder
from retain.kv.text import common_prefix_length, hash_block, hash_blocks
from retain.types import Ints


class RadixTree:
    """Cached texts over the pages of one pool.

    Before pages are evicted `on_evict(node, n)` is called: the node loses its pages from the n-th on, and its snapshot.
    Before a text drops a snapshot that it has outgrown, `on_outgrown(node)` is.
    """

    def __init__(self, pool: PagePool, page_size: int, ladder: SnapshotLadder | None = None):
        self.pool = pool
        self.page_size = page_size
        self.roots: dict[bytes, Node] = {}
        self.ladder = ladder or SnapshotLadder(0)
        self.num_holders = np.zeros(pool.num_pages, np.int32)  # nodes and snapshots of the tree that hold each page
        self.num_text_holders = np.zeros(pool.num_pages, np.int32)  # of these the snapshots that need the text
        self.clock = itertools.count(1)
        self.pins = Pins()
        self.on_evict: Callable[[Node, int], None] | None = None
        self.on_outgrown: Callable[[Node], None] | None = None
        self.evictions: deque[EvictionRecord] = deque(maxlen=4096)  # the latest ones
        self.history: PrefixHistory | None = None  # set once somebody asks for a diagnosis
        self.observer: PrefixObserver | None = None

    # ---- finding -------------------------------------------------------------------------------------------------

    def match_prefix(
        self, root_hash: bytes, tokens: Sequence[int], max_length: int, needs_snapshot: bool
    ) -> PrefixMatch | None:
        """Return the longest cached prefix of a text, of at most `max_length` tokens; None if there is none.

        Where the text `needs_snapshot` it ends where one lets it go on.
        """
        root = self.roots.get(root_hash)
        if root is None or max_length < 1:
            return None
        S = self.page_size
        text = np.asarray(tokens[:max_length], np.int32)
        path, num_full = self._walk(root, self.hash_blocks(root_hash, text))
        full_length = num_full * S
        partial = self._partial_matches(path, num_full, text)
        tail, num_equal = partial[0] if partial else (None, 0)
        common = length = full_length + num_equal
        snapshot = None
        if needs_snapshot:
            ends = [(min(full_length, self._end_position(n)), n, False) for n, _ in path]
            ends += [(min(full_length + k, self._end_position(n)), n, True) for n, k in partial]
            ends += [(self._end_position(n), n, False) for n in self._passed_ends(path, text)]
            usable = [(end, n, i) for end, n, i in ends if n.snapshot and n.snapshot.min_resume_position <= end]
            length, holder, is_partial = max(usable, key=lambda x: x[0], default=(0, None, False))
            tail = holder if is_partial else None
            if holder:
                snapshot = holder.snapshot
                holder.snapshot_used = next(self.clock)
        if tail is path[-1][0]:
            path[-1] = tail, path[-1][1] + 1
        elif tail:
            path.append((tail, 1))
        self._touch([node for node, _ in path])
        for node, _ in path:
            node.record_hit()
        pages = np.concatenate([node.pages[..., :n] for node, n in path], -1)
        return PrefixMatch(length, pages, snapshot, common)

    def pages_of(self, root_hash: bytes, tokens: Sequence[int]) -> Ints:
        """Return the pages of the whole blocks of a text that are cached, [K, n]. Counts as no use."""
        root = self.roots[root_hash]
        path, _ = self._walk(root, self.hash_blocks(root_hash, np.asarray(tokens, np.int32)))
        return np.concatenate([node.pages[..., :n] for node, n in path], -1)

    def nearest_text(self, root_hash: bytes, tokens: Ints) -> tuple[Ints, int] | None:
        """Return the cached text that shares the most first tokens, and their number. Counts as no use."""
        root = self.roots.get(root_hash)
        if root is None or not root.children:
            return None
        path, num_full = self._walk(root, self.hash_blocks(root_hash, tokens))
        longest = self._partial_matches(path, num_full, tokens)[:1]
        node, num_equal = longest[0] if longest else (path[-1][0], 0)
        spans = [n.tokens for n, _ in path if n is not node] + [node.tokens]
        while node.children:
            node = max(_children(node), key=lambda n: n.last_used)
            spans.append(node.tokens)
        return np.concatenate(spans), num_full * self.page_size + num_equal

    def hash_blocks(self, root_hash: bytes, tokens: Ints) -> list[bytes]:
        """Return the block hashes of a text's whole pages, in order; they name these pages in tiers, too."""
        return hash_blocks(root_hash, tokens, self.page_size)

    def _walk(self, root: Node, block_hashes: Sequence[bytes]) -> tuple[list[tuple[Node, int]], int]:
        """Follow block hashes from the root. Returns each node with its number of matched pages, and their sum."""
        path = [(root, 0)]
        at = 0
        while at < len(block_hashes) and (child := path[-1][0].children.get(block_hashes[at])):
            pairs = zip(child.block_hashes, block_hashes[at:], strict=False)
            n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            path.append((child, n))
            at += n
            if n < len(child.block_hashes):
                break
        return path, at

    def _partial_matches(
        self, path: Sequence[tuple[Node, int]], num_full_pages: int, tokens: Ints
    ) -> list[tuple[Node, int]]:
        """Return the nodes that have a beginning of the page after a path, and its length; the longest first."""
        S = self.page_size
        node, n = path[-1]
        rest = tokens[num_full_pages * self.page_size :]
        is_inside = n < len(node.block_hashes)
        pages = (
            [(node, node.tokens[n * S : (n + 1) * S])] if is_inside else [(c, c.tokens[:S]) for c in _children(node)]
        )
        found = [(c, num_equal) for c, page in pages if (num_equal := common_prefix_length(page, rest))]
        return sorted(found, key=lambda x: (-x[1], x[0].snapshot is None))

    def _passed_ends(self, path: Sequence[tuple[Node, int]], tokens: Ints) -> Iterator[Node]:
        """Yield the nodes of less than a page that lie on a path: texts that a longer one has repeated."""
        for parent, n in path:
            begin = self._end_position(parent)
            for node in _children(parent) if n == len(parent.block_hashes) else ():
                end = begin + len(node.tokens)
                if end % self.page_size and end <= len(tokens) and np.array_equal(node.tokens, tokens[begin:end]):
                    yield node

    def _end_position(self, node: Node) -> int:
        """Return the number of tokens of the text up to the node's end."""
        return node.start_page * self.page_size + len(node.tokens)

    def _touch(self, nodes: Sequence[Node]) -> None:
        now = next(self.clock)
        for node in nodes:
            node.last_used = now

    # ---- inserting -----------------------------------------------------------------------------------------------

    def insert(
        self,
        root_hash: bytes,
        tokens: Sequence[int],
        pages: Ints,
        snapshot: Snapshot | None = None,
        begun_at: int = 0,
    ) -> StoredPages | None:
        """Cache a text: `pages` [K, n] hold its tokens, and `snapshot` what it needs beside them to go on.

        The tree takes a reference to the pages that it does not have. It takes over the snapshot, or frees it. Of a
        text that went on from position `begun_at`, snapshots before that are dropped, if no other text parts there
        and they are not on the ladder.

        Returns the whole pages that are new, or None.
        """
        S = self.page_size
        text = np.asarray(tokens, np.int32)
        if root_hash not in self.roots:
            self.roots[root_hash] = Node(0, text[:0], [], pages[..., :0], needs_snapshot=snapshot is not None)
        hashes = self.hash_blocks(root_hash, text)
        path, num_full = self._walk(self.roots[root_hash], hashes)
        self._touch([n for n, _ in path])
        longest = self._partial_matches(path, num_full, text)[:1]
        if not snapshot and num_full * S + sum(k for _, k in longest) == len(text):
            return None
        node, n = path[-1]
        if n < len(node.block_hashes):
            node = self._split(node, n)
        stored = None
        if num_full < len(hashes):
            parent_hash = hashes[num_full - 1] if num_full else None
            stored = StoredPages(parent_hash, hashes[num_full:], text[num_full * S : len(hashes) * S])
            node = self._add_child(node, num_full, stored.tokens, hashes[num_full:], pages)
        if len(rest := text[len(hashes) * S :]):
            tail_hash = hash_block(hashes[-1] if hashes else root_hash, rest)
            node = node.children.get(tail_hash) or self._add_child(node, len(hashes), rest, [tail_hash], pages)
        if snapshot:
            self._set_snapshot(node, snapshot)
            self._drop_outgrown(node, len(text), begun_at)
        return stored

    def _set_snapshot(self, node: Node, snapshot: Snapshot) -> None:
        """Give a node the snapshot at its end, unless it has one."""
        node.snapshot_used = next(self.clock)
        self.num_holders[snapshot.page_list] += 1
        if node.snapshot:
            self._free_pages(snapshot.page_list)
            return
        node.snapshot = snapshot
        if snapshot.holds_text:
            self.num_text_holders[snapshot.page_list] += 1

    def _drop_snapshot(self, node: Node) -> None:
        """Free the pages of a node's snapshot."""
        if not node.snapshot:
            return
        self._free_pages(node.snapshot.page_list)
        if node.snapshot.holds_text:
            self.num_text_holders[node.snapshot.page_list] -= 1
        node.snapshot = None

    def _drop_holders_of_text(self, pages: Ints) -> None:
        """Drop the snapshots that are of no use without these pages of a text."""
        if not self.num_text_holders[pages].any():
            return
        lost = np.zeros(self.pool.num_pages, bool)
        lost[pages] = True
        for node in self.iter_nodes():
            if node.snapshot and node.snapshot.holds_text and lost[node.snapshot.page_list].any():
                self._drop_snapshot(node)

    def _drop_outgrown(self, node: Node, length: int, begun_at: int) -> None:
        """Drop what a text of `length` tokens, which ends with a node, has outgrown.

        These are its snapshots before position `begun_at`, without those where texts part, those on the ladder, and
        pinned ones; first parts of pages that it repeats; and rungs that the ladder leaves out further back.
        """
        while parent := node.parent:
            if len(parent.children) > 1:
                repeated = [c for c in _children(parent) if self._is_repeated(c, node.tokens)]
                parent.is_branch = parent.is_branch or len(parent.children) > 1 + len(repeated)
                for child in repeated:
                    if self._is_outgrown(child, length, begun_at):
                        self._drop_outgrown_snapshot(child)
                        self._remove(child)
            if self._is_outgrown(parent, length, begun_at) and not parent.is_branch:
                self._drop_outgrown_snapshot(parent)
            node = parent

    def _is_outgrown(self, node: Node, length: int, begun_at: int) -> bool:
        """Return whether a text of `length` tokens, which began at `begun_at`, needs no snapshot at a node's end."""
        position = self._end_position(node)
        reach = node.snapshot.ladder_reach if node.snapshot else 0
        is_behind = position < begun_at or self.ladder.has(position, reach)
        return is_behind and node not in self.pins and not self.ladder.keeps(position, length, reach)

    def _drop_outgrown_snapshot(self, node: Node) -> None:
        if node.snapshot and self.on_outgrown:
            self.on_outgrown(node)
        self._drop_snapshot(node)

    def _is_repeated(self, node: Node, tokens: Ints) -> bool:
        """Return whether a node is the first part of a page that a sibling with these tokens has, too."""
        n = len(node.tokens)
        return n < min(self.page_size, len(tokens)) and common_prefix_length(node.tokens, tokens) == n

    def _add_child(self, parent: Node, start_page: int, tokens: Ints, block_hashes: list[bytes], pages: Ints) -> Node:
        own_pages = pages[..., start_page : start_page + len(block_hashes)].copy()
        node = Node(start_page, tokens, block_hashes, own_pages, parent=parent)
        for sibling in _children(parent):  # a partial page that begins the new node is cached twice
            if not sibling.snapshot and self._is_repeated(sibling, tokens):
                self.pins.inherit(node, sibling)
                self._remove(sibling)
        parent.children[block_hashes[0]] = node
        self.pool.incref(node.page_list)
        self.num_holders[node.page_list] += 1
        self._touch([node])
        return node

    def _split(self, node: Node, num_pages: int) -> Node:
        """Split a node after its first pages. Returns the new parent, which has these."""
        assert node.parent
        cut = num_pages * self.page_size
        hashes = node.block_hashes[:num_pages]
        pages = node.pages[..., :num_pages]
        upper = Node(node.start_page, node.tokens[:cut], hashes, pages, parent=node.parent, last_used=node.last_used)
        self.pins.inherit(upper, node)
        node.parent.children[node.block_hashes[0]] = upper
        node.start_page = node.start_page + num_pages
        node.tokens = node.tokens[cut:]
        node.block_hashes = node.block_hashes[num_pages:]
        node.pages = node.pages[..., num_pages:]
        node.parent = upper
        upper.children[node.block_hashes[0]] = node
        return upper

    # ---- pinning -------------------------------------------------------------------------------------------------

    def pin(self, root_hash: bytes, tokens: Sequence[int], seconds: float, owner: str = "") -> int:
        """Keep the cached prefix of a text for `seconds`, unless a request could not run at all.

        Pins hold half of the pool at most, and those of an `owner` leave room to others (see Pins.add). Returns the
        number of tokens pinned, from the text's beginning: fewer where there is no room.
        """
        text = np.asarray(tokens, np.int32)
        if root_hash not in self.roots:
            return 0
        path, num_full = self._walk(self.roots[root_hash], self.hash_blocks(root_hash, text))
        tail = self._partial_matches(path, num_full, text)[:1]
        self.pins.expire()
        lengths = [(node, n * self.page_size) for node, n in path[1:]] + tail
        num_nodes = self.pins.add([node for node, _ in lengths], seconds, owner, self.pool.num_pages // 2)
        return sum(num_tokens for _, num_tokens in lengths[:num_nodes])

    def unpin_all(self) -> bool:
        """Drop all pins. Returns whether there were any."""
        had_pins = bool(self.pins)
        self.pins.clear()
        return had_pins

    # ---- evicting ------------------------------------------------------------------------------------------------

    @property
    def num_evictable_pages(self) -> int:
        """Pages that only the tree holds, without pinned ones."""
        self.pins.expire()
        exclusive = (self.num_holders > 0) & (self.pool.ref_counts == self.num_holders)
        for node in self.pins:
            exclusive[node.all_pages] = False
        return int(np.count_nonzero(exclusive))

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages, or none if fewer are evictable: what is worth the least first.

        Leaves and snapshots whose pages are in use free nothing. They are evicted only if the others are not enough,
        since leaves keep their parents from becoming leaves. Pinned nodes stay.
        """
        if num_pages > self.num_evictable_pages:
            return
        num_pages -= self._evict_least(num_pages, in_use=False)
        if num_pages > 0:
            self._evict_least(num_pages, in_use=True)
        self.roots = {root_hash: root for root_hash, root in self.roots.items() if root.children}

    def _evict_least(self, num_pages: int, in_use: bool) -> int:
        """Evict leaves and snapshots, with those `in_use` or without. Returns the number of freed pages."""
        num_free = self.pool.num_free
        now = next(self.clock)
        heap = candidates(self.roots.values(), self.page_size, now)
        order = itertools.count(len(heap))
        heapq.heapify(heap)
        while (missing := num_free + num_pages - self.pool.num_free) > 0 and heap:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            if parent is None or node in self.pins:
                continue  # it was found as a leaf and as the holder of a snapshot
            if node.snapshot and node.snapshot.holds_text and not in_use:
                continue  # it frees nothing, and goes with its text
            if node.children:
                if node.snapshot and (in_use or self._has_evictable_pages(node.snapshot.page_list)):
                    self._evict_snapshot(node)
                continue
            num_exclusive = self._num_exclusive_pages(node.all_pages)
            if num_exclusive > missing and not node.snapshot:  # the node's end is enough
                num_blocks = len(node.block_hashes)
                pages_per_block = max(num_exclusive // num_blocks, 1)
                self._truncate(node, max(num_blocks - -(-missing // pages_per_block), 0))
            elif in_use or not node.all_pages.size or self._has_evictable_pages(node.all_pages):
                self._truncate(node, 0)
            if parent.parent and not parent.children and parent not in self.pins:
                heapq.heappush(heap, (leaf_value(parent, self.page_size, now), next(order), parent))
        return self.pool.num_free - num_free

    def evict_holders(self, pages: Ints) -> None:
        """Evict the snapshots and the texts that hold one of these pages, but for pinned ones.

        A row must write over it, and the pool has no other.
        """
        wanted = np.zeros(self.pool.num_pages, bool)
        wanted[pages] = True
        for node in list(self.iter_nodes()):
            if node.snapshot and node not in self.pins and wanted[node.snapshot.page_list].any():
                self._evict_snapshot(node)
        for node in reversed(list(self.iter_nodes())):  # children come before their parents
            holds = wanted[node.pages].any(axis=0)  # which of its blocks
            if holds.any():
                self._evict_below(node)
                if not node.children and node not in self.pins:
                    self._truncate(node, 0 if node.snapshot else int(holds.argmax()))

    def _evict_below(self, node: Node) -> None:
        """Evict what continues a node, but for pinned texts."""
        for child in _children(node):
            self._evict_below(child)
            if not child.children and child not in self.pins:
                self._truncate(child, 0)

    def _evict_snapshot(self, node: Node) -> None:
        """Evict the snapshot of a node that stays."""
        if self.on_evict:
            self.on_evict(node, len(node.block_hashes))
        self._drop_snapshot(node)

    def _has_evictable_pages(self, pages: Ints) -> bool:
        """Return whether the tree alone holds one of these pages, once or more often."""
        return bool((self.pool.ref_counts[pages] == self.num_holders[pages]).any())

    def _num_exclusive_pages(self, pages: Ints) -> int:
        """Return how many of these pages are free once their text and what needs it are gone."""
        return int(np.count_nonzero(self.pool.ref_counts[pages] - self.num_text_holders[pages] == 1))

    def clear(self) -> None:
        """Drop all texts and pins, without `on_evict`."""
        for node in list(self.iter_nodes()):
            self._drop_snapshot(node)
            self._free_pages(node.page_list)
        self.roots.clear()
        self.pins.clear()
        if self.observer:
            self.observer.on_cleared()

    def _truncate(self, node: Node, num_pages: int) -> None:
        """Evict all but the first pages of a leaf."""
        if self.on_evict:
            self.on_evict(node, num_pages)
        self.evictions.append(node.to_eviction_record())
        if self.history:
            self.history.evict(node.block_hashes[num_pages:])
        if self.observer:
            self.observer.on_removed(node.block_hashes[num_pages:])
        self._drop_holders_of_text(node.pages[..., num_pages:].ravel())
        if not num_pages:
            return self._remove(node)
        self._free_pages(node.pages[..., num_pages:].ravel())
        node.tokens = node.tokens[: num_pages * self.page_size]
        node.block_hashes = node.block_hashes[:num_pages]
        node.pages = node.pages[..., :num_pages]

    def _remove(self, node: Node) -> None:
        assert node.parent and not node.children
        del node.parent.children[node.block_hashes[0]]
        node.parent = None
        self.pins.discard(node)
        self._drop_snapshot(node)
        self._free_pages(node.page_list)

    def _free_pages(self, pages: Ints) -> None:
        self.num_holders[pages] -= 1
        self.pool.free(pages)

    def iter_nodes(self) -> Iterator[Node]:
        """Iterate over all nodes but the roots."""
        stack = [child for root in self.roots.values() for child in _children(root)]
        while stack:
            node = stack.pop()
            yield node
            stack += _children(node)

    @property
    def all_pages(self) -> Ints:
        """Pages that the tree holds, for the accountant."""
        return np.concatenate([np.zeros(0, np.int32), *(n.all_pages for n in self.iter_nodes())])


def _children(node: Node) -> list[Node]:
    return list(node.children.values())
