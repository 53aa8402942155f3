"""The radix tree: what computed texts left behind, so that no prefix is computed twice.

There is one tree for each first link of texts, which covers the tenant's salt, the model and the windows. A node is a
part of a text: whole blocks, or, as a tail, the beginning of one. It is found by the chained hashes of blocks. It may
hold the pages of its blocks, [K, n] (kv/memory/block_layout.py), and checkpoints at its end (kv/checkpoints). Pages
and checkpoints are shared by reference count, like those in one more block table.

A checkpoint completes pages of its text, and goes with them, or it stands in for them. The latter lives at a node that
may have no pages: a row with a budget leaves none behind the first eviction. If a later text brings these pages, the
node gets them; if they are evicted, the checkpoint stays. A node that holds nothing, and leads to nothing, is removed.

Checkpoints stay at the ends of texts, where texts part, and on a ladder inside long ones. What is evicted first is told
by the tokens that it saves, per page, and by how long ago it was used (eviction_order.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from retain.kv.checkpoints import TextCheckpoint, checkpoint_name
from retain.kv.memory.pool import PagePool
from retain.kv.prefix.checkpoint_ladder import CheckpointLadder
from retain.kv.prefix.events import PrefixObserver, StoredPages
from retain.kv.prefix.eviction_order import Ages, EvictionCandidate, candidates, leaf_value
from retain.kv.prefix.history import PrefixHistory
from retain.kv.prefix.node import NO_BLOCKS, NO_MATCH, NO_PAGES, EvictionRecord, Node, PrefixMatch
from retain.kv.prefix.pins import Pins
from retain.kv.prefix.tree_search import TreeSearch, children_of, nodes_below
from retain.kv.text import Keying, Text, common_prefix_length, salt_digest
from retain.types import Ints

# Called with a node, the number of its first blocks that keep their pages, and checkpoints that it loses.
OnEvict = Callable[[Node, int, Mapping[bytes, TextCheckpoint]], None]


class Inserted(NamedTuple):
    """The node at the end of a text, and the whole blocks whose pages are new, or None."""

    node: Node
    stored: StoredPages | None


class RadixTree:
    """Cached texts over the pages of one pool.

    `on_evict` is called before pages and checkpoints are evicted, and `on_outgrown(node, key)` before a text drops a
    checkpoint that it has outgrown.
    """

    def __init__(self, pool: PagePool, block_size: int, ladder: CheckpointLadder | None = None):
        self.pool = pool
        self.block_size = block_size
        self.search = TreeSearch(block_size)
        self.roots: dict[bytes, Node] = {}
        self.ladder = ladder or CheckpointLadder(0)
        self.num_holders = np.zeros(pool.num_pages, np.int32)  # nodes and checkpoints that hold each page
        self.clock = itertools.count(1)
        self.uses: deque[tuple[int, float]] = deque(maxlen=64)  # ticks and seconds of the latest
        self.pins = Pins()
        self.on_evict: OnEvict | None = None
        self.on_outgrown: Callable[[Node, bytes], None] | None = None
        self.evictions: deque[EvictionRecord] = deque(maxlen=4096)  # the latest ones
        self.history: PrefixHistory | None = None  # set once somebody asks for a diagnosis
        self.observer: PrefixObserver | None = None

    # ---- finding -------------------------------------------------------------------------------------------------

    def match_prefix(self, link: bytes, text: Text, max_length: int) -> PrefixMatch:
        """Return what the tree has of the first `max_length` tokens of a text. Counts as no use."""
        root = self.roots.get(link)
        return NO_MATCH if root is None or max_length < 1 else self.search.match(root, link, text, max_length)

    def nearest_text(self, link: bytes, text: Text, key: bytes = b"") -> tuple[Ints, int] | None:
        """Return the cached text that shares the most first tokens, and their number. Counts as no use.

        Only texts that have pages count, or, where a key is given, a checkpoint of that key at their end.
        """
        root = self.roots.get(link)
        return None if root is None else self.search.nearest_text(root, link, text, key)

    def own_end(self, link: bytes, text: Text, with_continuation: bool = False) -> list[Node]:
        """Return the nodes that this text alone needs, its end first. See `TreeSearch.own_end`."""
        root = self.roots.get(link)
        return [] if root is None else self.search.own_end(root, link, text, with_continuation)

    def touch(self, nodes: Sequence[Node], keys: Sequence[tuple[Node, bytes]] = ()) -> None:
        """Record that a request begins with the pages of nodes, and with checkpoints, each by its node and key."""
        for node, key in keys:
            node.checkpoint_used[key] = next(self.clock)
        now = self._tick()
        for node in (*nodes, *(node for node, _ in keys)):
            node.last_used = now
            node.expected = None
        for node in nodes:
            node.record_hit()

    def _tick(self) -> int:
        """Return the time of a use."""
        now = next(self.clock)
        self.uses.append((now, self.pins.clock()))
        return now

    @property
    def _ages(self) -> Ages:
        """How old uses are now. Without two of them at different times a tick is a second."""
        seconds = self.pins.clock()
        ticks, since = self.uses[0] if self.uses else (0, seconds)
        now = next(self.clock)
        rate = (self.uses[-1][0] - ticks) / (self.uses[-1][1] - since) if self.uses and self.uses[-1][1] > since else 1
        return Ages(now, seconds, rate)

    # ---- inserting -----------------------------------------------------------------------------------------------

    def insert(
        self,
        link: bytes,
        text: Text,
        length: int,
        pages: Ints | None = None,
        checkpoints: Mapping[bytes, TextCheckpoint] | None = None,
        begun_at: int = 0,
        required: frozenset[bytes] = frozenset(),
    ) -> Inserted:
        """Cache the first `length` tokens of a text: `pages` [K, n] of their n blocks, and checkpoints at their end.

        The tree takes a reference to the pages that it does not have. It takes over the checkpoints, or frees them. Of
        a text that went on from position `begun_at`, checkpoints of these keys before that are dropped, if no other
        text parts there and they are not on the ladder. Texts of this link go on only where all `required` keys are.

        Returns the node that holds the last of these tokens; with checkpoints, one that ends there.
        """
        B = self.block_size
        if link not in self.roots:
            self.roots[link] = Node(
                0, text.tokens[:0], [], has_pages=True, required=required, salt_digest=salt_digest(text.salt)
            )
        root = self.roots[link]
        hashes = text.block_hashes(link, B, length)
        path, num_full = self.search.walk(root, hashes)
        now = self._tick()
        for node, _ in path:
            node.last_used = now
        if not checkpoints and self._has_pages_of(path, num_full, text.tokens[:length], text.keying):
            return Inserted(path[-1][0], None)
        node, n = path[-1]
        if n < len(node.block_hashes):
            node = self._split(node, n)
        if num_full < len(hashes):
            tokens = text.tokens[num_full * B : len(hashes) * B]
            node = self._add_child(node, num_full, tokens, hashes[num_full:], text.keying)
        if len(rest := text.tokens[len(hashes) * B : length]):
            tail_hash = text.end_hash(link, B, length)
            tail = node.children.get(tail_hash)
            node = tail or self._add_child(node, len(hashes), rest, [tail_hash], text.keying)
        stored = self._give_pages(node, pages) if pages is not None else None
        for key, checkpoint in (checkpoints or {}).items():
            self._set_checkpoint(node, key, checkpoint)
        if checkpoints:
            self._drop_outgrown(node, length, begun_at, list(checkpoints))
        return Inserted(node, stored)

    def _has_pages_of(self, path: Sequence[tuple[Node, int]], num_full: int, tokens: Ints, keying: Keying) -> bool:
        """Return whether the tree has pages of all these tokens, whose whole blocks are on a path."""
        if not path[-1][0].has_pages:
            return False
        partial = self.search.partial_matches(path, num_full, tokens, keying)
        longest = max((k for node, k in partial if node.has_pages), default=0)
        return num_full * self.block_size + longest == len(tokens)

    def _give_pages(self, node: Node, pages: Ints) -> StoredPages | None:
        """Give a node and those before it the pages [K, n] of the text's n blocks where they have none."""
        lacking = []
        at: Node | None = node
        while at and not at.has_pages:
            lacking.append(at)
            at = at.parent
        for new in reversed(lacking):
            new.has_pages = True
            new.pages = pages[:, new.start_block : new.start_block + len(new.block_hashes)].copy()
            self.pool.incref(new.page_list)
            self.num_holders[new.page_list] += 1
            self._drop_repeated(new)
        whole = [n for n in reversed(lacking) if len(n.tokens) == len(n.block_hashes) * self.block_size]
        if not whole:
            return None
        before = whole[0].parent
        parent_hash = before.block_hashes[-1] if before and before.block_hashes else None
        hashes = [h for n in whole for h in n.block_hashes]
        return StoredPages(parent_hash, hashes, np.concatenate([n.tokens for n in whole]))

    def _drop_repeated(self, node: Node) -> None:
        """Remove tails that a node with pages repeats, and that have no checkpoints: their block is cached twice."""
        assert node.parent
        for sibling in children_of(node.parent):
            if sibling is not node and not sibling.checkpoints and self._is_repeated(sibling, node):
                self.pins.inherit(node, sibling)
                self._drop_pages(sibling)

    def _set_checkpoint(self, node: Node, key: bytes, checkpoint: TextCheckpoint) -> None:
        """Give a node a checkpoint at its end, unless it has one of this key."""
        node.checkpoint_used[key] = next(self.clock)
        self.num_holders[checkpoint.page_list] += 1
        if key in node.checkpoints:
            self._free_pages(checkpoint.page_list)
        else:
            node.checkpoints[key] = checkpoint

    def _drop_checkpoint(self, node: Node, key: bytes) -> None:
        """Free the pages of a checkpoint."""
        if checkpoint := node.checkpoints.pop(key, None):
            del node.checkpoint_used[key]
            self._free_pages(checkpoint.page_list)

    def _drop_outgrown(self, node: Node, length: int, begun_at: int, keys: Sequence[bytes]) -> None:
        """Drop the checkpoints of these keys that a text of `length` tokens, which ends with a node, has outgrown.

        These are those before position `begun_at`, without those where texts part, those on the ladder, and pinned
        ones; tails that it repeats; and rungs that the ladder leaves out further back.
        """
        while parent := node.parent:
            if len(parent.children) > 1:
                repeated = [c for c in children_of(parent) if c is not node and self._is_repeated(c, node)]
                parent.is_branch = parent.is_branch or len(parent.children) > 1 + len(repeated)
                for child in repeated:
                    self._drop_outgrown_checkpoints(child, length, begun_at, keys)
                    if not child.checkpoints and child not in self.pins and (node.has_pages or not child.has_pages):
                        self._drop_pages(child)
            if not parent.is_branch:
                self._drop_outgrown_checkpoints(parent, length, begun_at, keys)
            node = parent

    def _drop_outgrown_checkpoints(self, node: Node, length: int, begun_at: int, keys: Sequence[bytes]) -> None:
        """Drop those of a node which a text of `length` tokens, that began at `begun_at`, does not need."""
        if node in self.pins:
            return
        position = self.search.end_position(node)
        for key in keys:
            checkpoint = node.checkpoints.get(key)
            reach = checkpoint.ladder_reach if checkpoint else 0
            is_behind = position < begun_at or self.ladder.has(position, reach)
            if checkpoint and is_behind and not self.ladder.keeps(position, length, reach):
                if self.on_outgrown:
                    self.on_outgrown(node, key)
                self._drop_checkpoint(node, key)

    def _is_repeated(self, node: Node, sibling: Node) -> bool:
        """Return whether a node is the first part of a block that a sibling has, too."""
        n = len(node.tokens)
        if n >= min(self.block_size, len(sibling.tokens)):
            return False
        num_equal = common_prefix_length(node.tokens, sibling.tokens)
        return node.keying.count_shared(sibling.keying, node.start_block * self.block_size, num_equal) == n

    def _add_child(
        self, parent: Node, start_block: int, tokens: Ints, block_hashes: list[bytes], keying: Keying
    ) -> Node:
        now = next(self.clock)
        node = Node(start_block, tokens.copy(), block_hashes, keying=keying, parent=parent, last_used=now)
        parent.children[block_hashes[0]] = node
        return node

    def _split(self, node: Node, num_blocks: int) -> Node:
        """Split a node after its first blocks. Returns the new parent, which has these."""
        upper = node.split(num_blocks, self.block_size)
        self.pins.inherit(upper, node)
        return upper

    # ---- pinning -------------------------------------------------------------------------------------------------

    def pin(self, link: bytes, text: Text, seconds: float, owner: str = "") -> int:
        """Keep the cached pages of a text for `seconds`, unless a request could not run at all.

        Pins hold half of the pool at most, and those of an `owner` leave room to others (see Pins.add). Returns the
        number of tokens pinned, from the text's beginning: fewer where there is no room.
        """
        match = self.match_prefix(link, text, len(text))
        self.pins.expire()
        nodes = [node for node in match.nodes if node.parent]
        num_nodes = self.pins.add(nodes, seconds, owner, self.max_pinned_pages)
        return min(sum(len(node.tokens) for node in nodes[:num_nodes]), match.length)

    @property
    def max_pinned_pages(self) -> int:
        """Pages that all pins hold at most."""
        return self.pool.num_pages // 2

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

        Ends of texts and checkpoints whose pages are in use free nothing. They are evicted only if the others are not
        enough, since pages behind keep those before them. Pinned nodes stay.
        """
        if num_pages > self.num_evictable_pages:
            return
        num_pages -= self._evict_least(num_pages, in_use=False)
        if num_pages > 0:
            self._evict_least(num_pages, in_use=True)
        self.roots = {link: root for link, root in self.roots.items() if root.children}

    def _evict_least(self, num_pages: int, in_use: bool) -> int:
        """Evict pages and checkpoints, with those `in_use` or without. Returns the number of freed pages."""
        num_free = self.pool.num_free
        ages = self._ages
        heap = candidates(self.roots.values(), self.block_size, ages)
        order = itertools.count(len(heap))
        heapq.heapify(heap)
        while (missing := num_free + num_pages - self.pool.num_free) > 0 and heap:
            _, _, node, key = heapq.heappop(heap)
            if node in self.pins:
                continue
            if key:
                checkpoint = node.checkpoints.get(key)
                if checkpoint and (in_use or self._has_evictable_pages(checkpoint.page_list)):
                    self._evict_checkpoint(node, key)
                continue
            if not node.has_pages:
                continue
            parent = node.parent
            self._evict_end(node, missing, in_use)
            if parent and parent.parent and parent.is_pages_leaf and parent not in self.pins:
                value = leaf_value(parent, self.block_size, ages)
                heapq.heappush(heap, EvictionCandidate(value, next(order), parent, b""))
        return self.pool.num_free - num_free

    def _evict_end(self, node: Node, num_pages: int, in_use: bool) -> None:
        """Evict the pages of a node behind which there are none, as far as that many are wanted."""
        dependents = node.dependents
        pages = np.concatenate([node.page_list, *(c.page_list for c in dependents.values())])
        num_exclusive = int(np.count_nonzero(self.pool.ref_counts[pages] == 1))
        if num_exclusive > num_pages and not dependents:  # the node's end is enough
            num_blocks = len(node.block_hashes)
            pages_per_block = max(num_exclusive // num_blocks, 1)
            self._evict_pages(node, max(num_blocks - -(-num_pages // pages_per_block), 0))
        elif in_use or not pages.size or self._has_evictable_pages(pages):
            self._evict_pages(node, 0)

    def evict_holders(self, pages: Ints) -> None:
        """Evict the checkpoints and the texts that hold one of these pages, but for pinned ones.

        A row must write over it, and the pool has no other.
        """
        wanted = np.zeros(self.pool.num_pages, bool)
        wanted[pages] = True
        for node in list(self.iter_nodes()):
            for key, checkpoint in list(node.checkpoints.items()) if node not in self.pins else ():
                if wanted[checkpoint.page_list].any():
                    self._evict_checkpoint(node, key)
        for node in list(self.iter_nodes()):
            if node.has_pages and node.pages.size:
                holds = (wanted[node.pages] & (node.pages > 0)).any(0)  # each of its blocks
                if holds.any():
                    self._evict_behind(node)
                    if node.is_pages_leaf and node not in self.pins:
                        self._evict_pages(node, 0 if node.dependents else int(holds.argmax()))

    def _evict_behind(self, node: Node) -> None:
        """Evict the pages that continue a node, but for pinned texts."""
        for child in children_of(node):
            if child.has_pages:
                self._evict_behind(child)
                if child.is_pages_leaf and child not in self.pins:
                    self._evict_pages(child, 0)

    def _evict_checkpoint(self, node: Node, key: bytes) -> None:
        """Evict one checkpoint of a node."""
        if self.on_evict:
            self.on_evict(node, len(node.block_hashes), {key: node.checkpoints[key]})
        if self.history:
            self.history.evict([checkpoint_name(node.block_hashes[-1], key)])
        self._drop_checkpoint(node, key)
        self._prune(node)

    def _evict_pages(self, node: Node, num_blocks: int) -> None:
        """Evict the pages of a node but those of its first blocks, with the checkpoints that are of no use then."""
        dependents = node.dependents
        if self.on_evict:
            self.on_evict(node, num_blocks, dependents)
        self.evictions.append(node.to_eviction_record())
        if self.history:
            self.history.evict(node.block_hashes[num_blocks:])
        if self.observer:
            self.observer.on_removed(node.block_hashes[num_blocks:])
        if num_blocks:
            self._split(node, num_blocks)
        self._drop_pages(node)

    def _drop_pages(self, node: Node) -> None:
        """Free the pages of a node behind which there are none, with the checkpoints that are of no use then."""
        self._free_pages(node.page_list)
        node.has_pages = False
        node.pages = NO_BLOCKS
        self._drop_dependents(node)
        self.pins.discard(node)
        self._prune(node)

    def _drop_dependents(self, node: Node) -> None:
        """Drop the checkpoints that need the pages of a node, also those behind it."""
        for key in node.dependents:
            self._drop_checkpoint(node, key)
        for child in children_of(node):
            self._drop_dependents(child)
            self._prune(child)

    def _prune(self, node: Node) -> None:
        """Remove a node that holds nothing and leads to nothing, and then those before it."""
        at: Node | None = node
        while at and at.parent and not (at.has_pages or at.checkpoints or at.children):
            parent = at.parent
            parent.children.pop(at.block_hashes[0], None)
            self.pins.discard(at)
            at.parent = None
            at = parent

    def _has_evictable_pages(self, pages: Ints) -> bool:
        """Return whether the tree alone holds one of these pages, once or more often."""
        return bool((self.pool.ref_counts[pages] == self.num_holders[pages]).any())

    def clear(self) -> None:
        """Drop all texts and pins, without `on_evict`."""
        self._drop_nodes(list(self.iter_nodes()))
        self.roots.clear()
        if self.observer:
            self.observer.on_cleared()

    def delete_salt(self, digest: bytes) -> int:
        """Drop the texts of a salt, also pinned ones, or of all salts whose digests begin so. Returns their tokens."""
        roots = {link: root for link, root in self.roots.items() if root.salt_digest.startswith(digest)}
        nodes = [node for root in roots.values() for node in nodes_below(root)]
        for node in nodes if self.observer else ():
            if node.has_pages and self.observer:
                self.observer.on_removed(node.block_hashes)
        self._drop_nodes(nodes)
        for link in roots:
            del self.roots[link]
        return sum(len(node.tokens) for node in nodes if node.has_pages)

    def _drop_nodes(self, nodes: Sequence[Node]) -> None:
        """Free what nodes hold, whose trees go with them."""
        for node in nodes:
            for key in list(node.checkpoints):
                self._drop_checkpoint(node, key)
            self._free_pages(node.page_list)
            self.pins.discard(node)

    # ---- the ends of texts, for hints ----------------------------------------------------------------------------

    def remove(self, node: Node, num_tokens: int, tail_hash: bytes) -> None:
        """Drop what a node holds behind its first tokens, and behind which there is nothing.

        Tokens that begin a block are a tail then, whose hash is given.
        """
        if not node.parent:
            return  # it held nothing, and went with what was behind it
        num_blocks, num_left = divmod(num_tokens, self.block_size)
        if num_blocks:
            self._split(node, num_blocks)
        hashes = node.block_hashes
        if self.observer and node.has_pages:
            self.observer.on_removed(hashes)
        if self.history:
            self.history.evict(hashes)
        for key in list(node.checkpoints):
            if self.on_outgrown:
                self.on_outgrown(node, key)
            self._drop_checkpoint(node, key)
        if not num_left or not node.has_pages or tail_hash in node.parent.children:
            self._drop_pages(node)
            return
        rest = node.pages[:, 1:]
        self._free_pages(rest[rest > 0])
        node.pages = node.pages[:, :1]
        node.tokens = node.tokens[:num_left]
        node.block_hashes = [tail_hash]
        del node.parent.children[hashes[0]]
        node.parent.children[tail_hash] = node

    def demote(self, node: Node) -> None:
        """Evict all that a node holds, behind which there is nothing."""
        for key in list(node.checkpoints):
            self._evict_checkpoint(node, key)
        if node.has_pages:
            self._evict_pages(node, 0)

    def _free_pages(self, pages: Ints) -> None:
        self.num_holders[pages] -= 1
        self.pool.free(pages)

    # ---- looking -------------------------------------------------------------------------------------------------

    def iter_nodes(self) -> Iterator[Node]:
        """Iterate over all nodes but the roots."""
        for root in self.roots.values():
            yield from nodes_below(root)

    @property
    def all_pages(self) -> Ints:
        """Pages that the tree holds, for the accountant."""
        return np.concatenate([NO_PAGES, *(n.all_pages for n in self.iter_nodes())])

    def check(self) -> None:
        """Check that pages follow pages, and that no node is of no use. Raises AssertionError."""
        for node in self.iter_nodes():
            assert node.parent and (node.parent.has_pages or not node.has_pages), "pages follow no pages"
            assert node.has_pages or node.checkpoints or node.children, "a node holds nothing"
            assert node.has_pages or not node.pages.size, "pages of a node that has none"
