"""What the prefix cache keeps in stores: pages that it evicts or a row has computed, and checkpoints of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from retain.kv.checkpoints import AnyKind, CheckpointedRow, Demand, TextCheckpoint
from retain.kv.memory.block_layout import BlockLayout
from retain.kv.memory.block_tables import BlockTables
from retain.kv.prefix.agreement import Agreement
from retain.kv.prefix.node import Node
from retain.kv.prefix.start import StoredCheckpoint
from retain.kv.stores.checkpoint_spans import CheckpointSpans
from retain.kv.stores.offloader import Offloader
from retain.kv.stores.span import CorruptionError
from retain.kv.stores.store import ReadJob, SpanRange, Store
from retain.kv.text import Text, salt_digest


class Tiers:
    """The stores of an offloader, for texts of one prefix cache."""

    def __init__(
        self,
        offloader: Offloader,
        groups: Sequence[BlockTables],
        layout: BlockLayout,
        kinds: Mapping[str, AnyKind],
    ):
        self.offloader = offloader
        self.pool = groups[0].pool
        self.block_size = layout.block_size
        self.kinds = kinds
        self.spans = CheckpointSpans(offloader, groups, layout.block_size)

    # ---- storing -------------------------------------------------------------------------------------------------

    def on_captured(self, first_link: bytes, text: Text, key: bytes, checkpoint: TextCheckpoint) -> None:
        """Put a checkpoint into the stores that keep what is computed."""
        stores = [store for store in self.offloader.stores if store.write_through]
        block_hashes = text.block_hashes(first_link, self.block_size, checkpoint.position)
        if block_hashes and stores:
            text_hash = text.end_hash(first_link, self.block_size, checkpoint.position)
            digest = salt_digest(text.salt)
            self._put(stores, text_hash, block_hashes[-1], len(block_hashes), key, checkpoint, digest)

    def on_evicted(self, node: Node, num_kept_blocks: int, checkpoints: Mapping[bytes, TextCheckpoint]) -> None:
        """Put what a node loses into every store that lacks it: whole blocks, and checkpoints."""
        is_tail = self._is_tail(node)
        if node.has_pages and node.pages.size and not is_tail:
            n = num_kept_blocks
            digest = node.root.salt_digest
            self.offloader.on_evicted(node.block_hashes[n:], node.start_block + n, node.pages[:, n:], digest)
        num_blocks = node.start_block + (0 if is_tail else len(node.block_hashes))
        for key, checkpoint in checkpoints.items() if num_blocks else ():
            text_hash, block_hash = self._end_hashes(node)
            digest = node.root.salt_digest
            self._put(self.offloader.stores, text_hash, block_hash, num_blocks, key, checkpoint, digest)

    def offload(self, node: Node) -> bool:
        """Put what a node holds into the stores. Returns whether they have it, or will have it when it is written.

        Of a tail they have checkpoints at most: its tokens are few, and follow those of its parent.
        """
        self.on_evicted(node, 0, node.checkpoints)
        is_tail = self._is_tail(node)
        if is_tail and (node.parent is None or not node.parent.block_hashes or not self.offload(node.parent)):
            return False
        keys = node.block_hashes if node.pages.size and not is_tail else []
        keys = [*keys, *(self._span_name(*self._end_hashes(node), key, c) for key, c in node.checkpoints.items())]
        return all(any(store.contains(key) for store in self.offloader.stores) for key in keys)

    def _is_tail(self, node: Node) -> bool:
        return len(node.tokens) < len(node.block_hashes) * self.block_size

    def _end_hashes(self, node: Node) -> tuple[bytes, bytes]:
        """Return the hash of the text up to a node's end, and that of the last whole block there."""
        holder = node.parent if self._is_tail(node) else node
        assert holder
        return node.block_hashes[-1], holder.block_hashes[-1]

    def _span_name(self, text_hash: bytes, block_hash: bytes, key: bytes, checkpoint: TextCheckpoint) -> bytes:
        """Return the key of a checkpoint at a text's end. One that needs pages has that of the last whole block."""
        return self.spans.name(block_hash if checkpoint.needs_pages else text_hash, key)

    def discard(self, block_hashes: Sequence[bytes]) -> None:
        """Remove the spans with one of these blocks from stores of this engine alone."""
        for store in self.offloader.stores:
            if not store.is_shared:
                store.delete_keys(block_hashes)

    def delete_salt(self, digest: bytes) -> None:
        """Remove the spans of a salt from all stores, see `Store.delete_salt`."""
        for store in self.offloader.stores:
            store.delete_salt(digest)

    def on_outgrown(self, node: Node, key: bytes) -> None:
        """Remove a checkpoint that stands in for pages from the stores of this engine alone."""
        if not node.checkpoints[key].needs_pages:
            self.spans.discard(self.spans.name(node.block_hashes[-1], key))

    def _put(
        self,
        stores: Sequence[Store],
        text_hash: bytes,
        block_hash: bytes,
        num_blocks: int,
        key: bytes,
        checkpoint: TextCheckpoint,
        digest: bytes,
    ) -> None:
        """Put a checkpoint behind so many whole blocks into stores. One that needs their pages is put at their end."""
        position = num_blocks * self.block_size if checkpoint.needs_pages else checkpoint.position
        keys = self._span_name(text_hash, block_hash, key, checkpoint), self.spans.name_of_block(block_hash, key)
        lacking = [store for store in stores if not store.contains(keys[0])]
        content = self.kinds[checkpoint.kind].to_span(checkpoint, position) if lacking else None
        if content:
            self.spans.put(
                lacking,
                keys,
                content.checkpoint.runs(),
                content.metadata,
                kind=checkpoint.kind,
                start_page=num_blocks,
                resumes_from=content.checkpoint.resumes_from,
                salt_digest=digest,
            )

    # ---- loading -------------------------------------------------------------------------------------------------

    def load(
        self, kind: AnyKind, place: SpanRange, demand: Demand, position: int, agreement: Agreement
    ) -> TextCheckpoint | None:
        """Read a checkpoint into pages, which the caller owns.

        None where a rank cannot read it, it does not let the demand go on, or the pool has too few pages.
        """
        read = self.spans.read(place, position, partial(self._decode, kind, place, demand, position), True)
        if not agreement.is_shared(read is not None) or not read or not self.pool.ensure_free(len(read[0].page_list)):
            return None
        numbered, data = read
        found: TextCheckpoint | None
        try:
            with self.pool.owned() as owned:
                owned += self.spans.allocate(numbered.runs())
                found = kind.with_pages(numbered, np.concatenate([np.zeros(0, np.int32), *owned]))
                self.spans.upload(place, found.runs(), data)
        except Exception as error:
            self.offloader.warnings.warn(f"tier {place.store.name}: a checkpoint could not be loaded", error)
            found = None
        if not agreement.is_shared(found is not None):
            self.pool.free(np.zeros(0, np.int32) if found is None else found.page_list)
            return None
        if found is None:
            return None
        if not place.store.write_through:
            place.store.delete(place.span)  # the tree has it now
        return found

    def prepare(
        self, stored: Sequence[StoredCheckpoint], demand: Demand, position: int
    ) -> list[tuple[AnyKind, TextCheckpoint, SpanRange]] | None:
        """Return checkpoints that complete pages, which are numbers yet. None where one cannot be read."""
        found = []
        for kind, _, place in stored:
            read = self.spans.read(place, position, partial(self._decode, kind, place, demand, position), False)
            if not read:
                return None
            found.append((kind, read[0], place))
        return found

    def attach(
        self, kind: AnyKind, numbered: TextCheckpoint, place: SpanRange, row: CheckpointedRow, position: int
    ) -> dict[int, list[ReadJob]]:
        """Give a checkpoint to a row before its pages are read. Returns the reads, by layer of the model."""
        with self.pool.owned() as owned:
            owned += self.spans.allocate(numbered.runs())
            pages = np.concatenate([np.zeros(0, np.int32), *owned])
            checkpoint = kind.with_pages(numbered, pages)
            kind.attach(row, position, checkpoint)
        self.pool.free(pages)  # the row holds them
        runs = checkpoint.runs()
        jobs: dict[int, list[ReadJob]] = {}
        for run, job in zip(runs, self.spans.read_jobs(place, runs), strict=True):
            if len(run.pages):
                assert run.layer is not None
                jobs.setdefault(run.layer, []).append(job)
        return jobs

    def _decode(
        self, kind: AnyKind, place: SpanRange, demand: Demand, position: int, metadata: bytes
    ) -> TextCheckpoint | None:
        try:
            found = kind.from_span(demand, position, place.span, metadata)
        except ValueError as error:
            raise CorruptionError(str(error)) from None
        first, last = kind.reach(demand, found)
        return found if first <= position <= last else None
