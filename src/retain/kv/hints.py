"""Hints: what callers know of texts that the cache cannot know, such as when an agent is back.

A hint names a text of its caller's own salt, so it changes nothing of others. What it asks for is done as far as the
caller's share of the pool goes, or not at all; no hint changes a token of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.journal import HINTS, journaled
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.returns import NEVER, ExpectedReturn
from retain.kv.prefix.start import Start
from retain.kv.row import CacheParts, Row
from retain.kv.row_task import RowTask
from retain.kv.text import KEY_BYTES, Text, salt_digest


class Prefetch(NamedTuple):
    """A row that is given what tiers have of a text, and in how many seconds a request is expected."""

    row: Row
    text: Text
    link: bytes
    seconds: float


class CacheHints:
    """Carry hints out. Each names a text, and the policy under which it was computed.

    What is loaded ahead of a request lies in a row of its own, `loading`, by its index. A request that needs its pages
    gets them.
    """

    index = HINTS  # in the journal

    def __init__(self, parts: CacheParts):
        self.parts = parts
        self.loading: dict[int, Prefetch] = {}

    @property
    def cache(self) -> PrefixCache:
        """The cache of the prefixes of earlier texts."""
        return self.parts.prefix_cache

    def may_exchange(self, method: str) -> bool:
        """Return whether ranks compare heads in a call of this method: never."""
        return False

    # ---- keeping and giving up -----------------------------------------------------------------------------------

    @journaled
    def retain(self, policy: EvictionPolicy, text: Text, seconds: float, owner: str = "") -> int:
        """Keep what the tree has of a text for `seconds`, as far as pins have room. Returns the number of tokens.

        Raises ValueError where nothing is kept.
        """
        if not self.cache.enabled:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing to pin")
        return self.cache.tree.pin(self.cache.first_link(text, policy), text, seconds, owner)

    @journaled
    def release(self, policy: EvictionPolicy, text: Text, begin: int = 0) -> int:
        """Forget what only this text has behind its first `begin` tokens: its branch is done. Returns the tokens.

        What continues it goes with it, unless it goes on in several ways. What other texts share stays, and what a
        running request uses is its own. Tiers of this engine alone forget what is forgotten here.
        """
        return self._release(policy, text, begin, with_continuation=True)

    def _release(self, policy: EvictionPolicy, text: Text, begin: int, with_continuation: bool) -> int:
        num_tokens = 0
        removed: list[bytes] = []
        B = self.cache.layout.block_size
        link = self.cache.first_link(text, policy)
        begin = min(begin, len(text))
        tail_hash = text.end_hash(link, B, begin) if begin % B else b""
        for node in self.cache.tree.own_end(link, text, with_continuation):
            num_kept = max(begin - node.start_block * B, 0)
            if num_kept >= len(node.tokens):
                break
            removed += node.block_hashes[num_kept // B :]
            num_tokens += len(node.tokens) - num_kept if node.has_pages else 0
            self.cache.tree.remove(node, num_kept, tail_hash)
        if self.cache.tiers and removed:
            self.cache.tiers.discard(removed)
            self.cache.store_again(link, text)  # spans may have held blocks that are kept
        return num_tokens

    @journaled
    def demote(self, policy: EvictionPolicy, text: Text) -> int:
        """Leave what only this text has to the tiers: its pages are free then. Returns the tokens.

        What the tiers do not take stays in the pool, as does what is pinned.
        """
        num_tokens = 0
        tree = self.cache.tree
        tree.pins.expire()
        tiers = self.cache.tiers
        for node in tree.own_end(self.cache.first_link(text, policy), text, with_continuation=True):
            is_stored = tiers is not None and node not in tree.pins and tiers.offload(node)
            if not self.cache.agreement.is_shared(is_stored) or not is_stored:
                break
            num_tokens += len(node.tokens) if node.has_pages else 0
            tree.demote(node)
        return num_tokens

    @journaled
    def expect(
        self,
        policy: EvictionPolicy,
        text: Text,
        owner: str = "",
        tool: str | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Let a text be kept by how soon it is asked for again: after `seconds`, or as the pauses of a tool say.

        The return is learned for the owner's tool, where one is named. Returns whether it is known when that will be.
        """
        return self._expect_turn(policy, text, owner, tool, seconds, len(text))

    @journaled
    def end_turn(
        self, policy: EvictionPolicy, text: Text, turn_end: int, history_len: int, owner: str, tool: str | None
    ) -> int:
        """Forget what of an answer the next turn does not begin with, and expect that turn; see `expect`.

        It begins with the first `history_len` tokens of the text. Those up to `turn_end`, where the answer begins, stay
        for another answer to the same prompt, as long as nothing needs their pages. Nothing is done where the next turn
        has begun. Returns the tokens forgotten.
        """
        if not self.cache.tree.own_end(self.cache.first_link(text, policy), text):
            return 0
        num_kept = max(turn_end, history_len)
        is_dead = num_kept < len(text) - 1
        self._expect_turn(policy, text, owner, tool, None, history_len)
        return self._release(policy, text, num_kept, with_continuation=False) if is_dead else 0

    def _expect_turn(
        self, policy: EvictionPolicy, text: Text, owner: str, tool: str | None, seconds: float | None, length: int
    ) -> bool:
        """Expect the first `length` tokens of a text. What is behind them is not asked for again, and goes first."""
        B = self.cache.layout.block_size
        link = self.cache.first_link(text, policy)
        if not (hashes := text.block_hashes(link, B, length)):
            return False
        expected = self.cache.returns.leave(hashes[-1], self.cache.tree.pins.clock(), owner, tool, seconds)
        for node in self.cache.tree.own_end(link, text):
            node.expected = expected if node.start_block * B < length else NEVER
        return expected is not None

    @journaled
    def reset(self, salt: str, whole_tenant: bool = False) -> int:
        """Forget all texts of a salt, in the pool and in every tier, or of all salts with its part before a slash.

        Requests that run go on, and leave their texts. Returns the tokens that the pool had.
        """
        return self._delete_salt(salt_digest(salt)[: KEY_BYTES // 2 if whole_tenant else KEY_BYTES])

    @journaled
    def reset_all(self) -> int:
        """Forget all texts, in the pool and in every tier, see `reset`."""
        return self._delete_salt(b"")

    def _delete_salt(self, digest: bytes) -> int:
        self._discard_loads(lambda text: salt_digest(text.salt).startswith(digest))
        if self.cache.tiers:
            self.cache.tiers.delete_salt(digest)
        return self.cache.tree.delete_salt(digest)

    # ---- loading ahead of a request ------------------------------------------------------------------------------

    @journaled
    def prefetch(self, policy: EvictionPolicy, task: RowTask, seconds: float) -> int:
        """Begin to load what tiers have of a text that is asked for in `seconds`. Returns the tokens cached then.

        It takes the place of what is worth least, and a request that needs the pages gets them. Loads have half of the
        pool at most, and a row each that no request needs now; nothing is loaded beyond that.
        """
        cache = self.cache
        link = cache.first_link(task.text, policy)
        found = cache.find(task.text, task.demand(policy))
        self._expect_soon(link, task.text, seconds)
        further = found.further
        if not cache.agrees_to_load(found, further is not None and self._has_room(further)):
            return further.position if further and self._is_loading(task.text, further.position) else found.position
        row = Row(self.parts, policy, len(task.text))
        row.start_ahead(task, found)
        self.loading[row.index] = Prefetch(row, task.text, link, seconds)
        if row.load is None:
            self.finish_prefetch(row.index)
        return max(row.num_computed, found.position)

    def _has_room(self, further: Start) -> bool:
        """Return whether there are a row and pages to load what tiers have of a text, and it is not loading."""
        if further.is_selective or not self.parts.slots.tables[0].free_rows:
            return False
        num_pages = self.cache.num_loaded_pages(further)
        num_loading = sum(p.row.num_pages for p in self.loading.values())
        tree = self.cache.tree
        has_pages = num_pages + num_loading <= tree.max_pinned_pages  # and no other load is given up for this one
        has_pages = has_pages and num_pages <= tree.pool.num_free + tree.num_evictable_pages
        return has_pages and not self._is_loading(further.text, further.position)

    def _expect_soon(self, link: bytes, text: Text, seconds: float) -> None:
        """Expect a text in `seconds`, where nothing else is known."""
        expected = ExpectedReturn(self.cache.tree.pins.clock(), (seconds,))
        for node in self.cache.tree.own_end(link, text):
            node.expected = node.expected or expected

    @journaled
    def finish_prefetch(self, index: int) -> None:
        """Wait until a text is loaded, and leave it to requests."""
        row, text, link, seconds = self.loading.pop(index)
        if row.load:
            row.load.wait()
            row.finish_load()
        row.close()
        if not row.has_failed:
            self._expect_soon(link, text, seconds)

    def end_loads(self, text: Text) -> None:
        """Leave what is loaded to requests, and wait for what is loaded of a text that a request asks for now."""
        for index, (row, own, *_) in list(self.loading.items()):
            n = row.num_computed
            if (row.load and row.load.is_done) or (own.group == text.group and own.ids[:n] == text.ids[:n]):
                self.finish_prefetch(index)

    def _is_loading(self, text: Text, num_tokens: int) -> bool:
        """Return whether the first tokens of a text are being loaded."""
        others = (p.text for p in self.loading.values() if p.row.num_computed >= num_tokens)
        return any(x.group == text.group and x.ids[:num_tokens] == text.ids[:num_tokens] for x in others)

    @journaled
    def discard_loads(self) -> bool:
        """Give up what is being loaded: a request needs the pages, or the row. Returns whether there was something."""
        return self._discard_loads(lambda text: True)

    def _discard_loads(self, is_meant: Callable[[Text], bool]) -> bool:
        found = [(index, p.row) for index, p in self.loading.items() if is_meant(p.text)]
        for index, row in found:
            del self.loading[index]
            row.has_failed = True  # nothing is left of it
            row.close()
        return bool(found)

    @property
    def num_reclaimable_pages(self) -> int:
        """Pages that are free once no load holds them, beside those that the tree alone holds now."""
        if not self.loading:
            return 0
        pool = self.parts.slots.tables[0].pool
        tree = self.cache.tree
        held = np.bincount(self.parts.slots.page_list(list(self.loading)), minlength=pool.num_pages)
        exclusive = (held > 0) & (pool.ref_counts - held == tree.num_holders)
        for node in tree.pins:
            exclusive[node.all_pages] = False
        return int(np.count_nonzero(exclusive))
