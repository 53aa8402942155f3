"""Evicted states in tiers: rows with a budget go on from what an earlier row has kept, after its pages were evicted
from the pool, and after a restart.

A state ends at any token. So a look-up asks for each block of a text, from its end, whether there is a state in it; and
where there is one, for each of the block's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evicted_state import EvictedState
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.state_format import (
    FORMAT_VERSION,
    StateShape,
    decode_state,
    encode_state,
    page_runs,
    with_pages,
)
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.kv.prefix.node import Node
from retain.kv.prefix.resuming import can_go_on
from retain.kv.stores.manager import Offloader
from retain.kv.stores.span import CorruptionError
from retain.kv.stores.state_spans import PageRun, StateSpans
from retain.kv.stores.store import SpanRange, Store
from retain.kv.text import hash_block, iter_end_hashes
from retain.types import Bytes, Ints


@dataclass(frozen=True)
class FoundState:
    """A state in a tier, after the first `position` tokens of a text, of which nothing else saves `num_saved`."""

    position: int
    span: SpanRange
    num_saved: int


class StateTiers:
    """The evicted states of a prefix cache in the tiers of an offloader."""

    def __init__(self, offloader: Offloader, groups: Sequence[BlockTables], planner: CapacityPlanner):
        self.offloader = offloader
        self.groups = groups
        self.planner = planner
        self.block_size = planner.block_size
        demoted = [(g, t.demoted.store) for g, t in enumerate(groups) if t.demoted]
        kinds = [((g, False), t.store) for g, t in enumerate(groups)] + [((g, True), store) for g, store in demoted]
        self._stores: list[PageStore] = [store for _, store in kinds]
        self._pool_of = {kind: i for i, (kind, _) in enumerate(kinds)}  # group and whether demoted, to a pool
        self.spans = StateSpans(offloader, [store.kv for store in self._stores])
        sizes = [(t.page_bytes, t.kv.page_size) for t in self.spans.transfers]
        self._format = repr((FORMAT_VERSION, sizes)).encode()  # of the metadata, and of the pages of each pool

    # ---- keys ----------------------------------------------------------------------------------------------------

    def _key_of_text(self, text_hash: bytes) -> bytes:
        return blake2b(text_hash + b"state" + self._format, digest_size=16).digest()

    def _key_of_block(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash + b"states in the next block" + self._format, digest_size=16).digest()

    # ---- storing -------------------------------------------------------------------------------------------------

    def on_stored(self, block_hashes: Sequence[bytes], tokens: Ints, state: EvictedState) -> None:
        """Put the state at the end of a text into the tiers that keep what is computed.

        `block_hashes` are those of the text's whole blocks. Texts of less than a block are not kept.
        """
        stores = [store for store in self.offloader.stores if store.write_through]
        if block_hashes and stores:
            rest = tokens[len(block_hashes) * self.block_size :]
            text_hash = hash_block(block_hashes[-1], rest) if len(rest) else block_hashes[-1]
            self._put(stores, text_hash, block_hashes[-1], state)

    def on_evicted(self, node: Node, state: EvictedState) -> None:
        """Put the state at the end of a node into every tier that lacks it."""
        block_hash = self._last_whole_block(node)
        if block_hash:
            self._put(self.offloader.stores, node.block_hashes[-1], block_hash, state)

    def on_outgrown(self, node: Node) -> None:
        """Remove the state at the end of a node from the tiers of this engine alone."""
        if isinstance(node.snapshot, EvictedState):
            self.spans.discard(self._key_of_text(node.block_hashes[-1]))

    def _last_whole_block(self, node: Node) -> bytes | None:
        """Return the hash of the last whole block of the text up to a node's end; None where it has none."""
        if len(node.tokens) == len(node.block_hashes) * self.block_size:
            return node.block_hashes[-1]
        return node.parent.block_hashes[-1] if node.parent and node.start_page else None

    def _put(self, stores: Sequence[Store], text_hash: bytes, block_hash: bytes, state: EvictedState) -> None:
        key = self._key_of_text(text_hash)
        lacking = [store for store in stores if not store.contains(key)]
        if lacking:
            start_page = state.position // self.block_size
            keys = key, self._key_of_block(block_hash)
            runs = self._runs(state, self._shape(state.policy))
            self.spans.put(lacking, keys, state.position, start_page, runs, encode_state(state))

    def _runs(self, state: EvictedState, shape: StateShape) -> list[PageRun]:
        """List the pages of a state, layer after layer, without layers that have none."""
        runs = page_runs(state, shape)
        return [PageRun(self._pool_of[group, demoted], pages) for group, demoted, pages in runs if len(pages)]

    def _shape(self, policy: EvictionPolicy) -> StateShape:
        """Return what a state of this policy must fit."""
        windows = [group.windows(policy).tolist() for group in self.planner.groups]
        return StateShape(
            num_kv_heads=[t.counts.shape[2] for t in self.groups],
            page_sizes=[t.page_size for t in self.groups],
            score_columns=[t.kv.mass.shape[1] for t in self.groups],
            full_layers=[own.count(NO_WINDOW) for own in windows],
            sliding=[(g, w) for g, own in enumerate(windows) for w in own if w < NO_WINDOW],
            device=self.groups[0].kv.device,
        )

    # ---- loading -------------------------------------------------------------------------------------------------

    def find(self, block_hashes: Sequence[bytes], tokens: Ints, after: int) -> FoundState | None:
        """Return the latest state of a text in the tiers, after more than `after` tokens.

        `block_hashes` are those of the text's whole blocks.
        """
        for position, key in self._keys(block_hashes, tokens, after):
            if (span := self.spans.find(key)) and span.span.resumes_from == position:
                return FoundState(position, span, position - after)
        return None

    def _keys(self, block_hashes: Sequence[bytes], tokens: Ints, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield the positions where a state may be, the last first, and the key that it would have."""
        S = self.block_size
        for n in range(len(block_hashes), max(after // S, 1) - 1, -1):
            if self.spans.has(self._key_of_block(block_hashes[n - 1])):
                for end, text_hash in iter_end_hashes(block_hashes, tokens, S, n):
                    if end > after:
                        yield end, self._key_of_text(text_hash)

    def load(self, found: FoundState, policy: BudgetPolicy) -> EvictedState | None:
        """Read a state into pages, which the caller owns; `policy` is that of the row that goes on from it.

        None where the cost model says that computing the tokens is faster, where the state cannot be read or does not
        fit, and where the pool has too few pages.
        """
        span = found.span.span
        shape = self._shape(policy)

        def decode(metadata: bytes) -> EvictedState | None:
            try:
                state = decode_state(metadata, policy, shape, sum(span.num_blocks))
            except ValueError as error:
                raise CorruptionError(str(error)) from None
            sizes = [len(run.pages) for run in self._runs(state, shape)]
            if state.position != found.position or sizes != list(span.num_blocks):
                raise CorruptionError("an evicted state does not fit its pages")
            return state if can_go_on(state, policy) else None

        if not self.offloader.should_load([found.span], found.num_saved):
            return None
        read = self.spans.read(found.span, found.num_saved, decode)
        state = read and self._upload(*read, shape, found.span.store)
        if state and not found.span.store.write_through:
            found.span.store.delete(span)  # the tree has it now
        return state

    def _upload(
        self, state: EvictedState, data: Sequence[Bytes], shape: StateShape, store: Store
    ) -> EvictedState | None:
        """Return a state of a store in pages of the pool; None where there are too few, and after an error."""
        pool = self.groups[0].pool
        if not pool.ensure_free(state.num_pages):
            return None
        owned: list[Ints] = []
        try:
            for run in self._runs(state, shape):
                owned.append(self._stores[run.pool].allocate(len(run.pages)))
            state = with_pages(state, np.concatenate(owned))
            self.spans.upload(self._runs(state, shape), data)
        except BaseException as error:
            pool.free(np.concatenate([np.zeros(0, np.int32), *owned]))
            if not isinstance(error, Exception):
                raise
            self.offloader.warnings.warn(f"tier {store.name}: a state could not be loaded", error)
            return None
        return state
