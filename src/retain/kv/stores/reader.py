"""Reads the blocks of a stored span, and compares each with its checksum."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from retain.kv.stores.span import CorruptionError
from retain.kv.stores.span_file import StoredSpan, checksum
from retain.types import Bytes

Read = Callable[[int, int], Bytes]  # bytes `begin` to `end` of the file


class StoredSpanReader:
    """Reads a span. See `SpanReader` for the methods; `close` ends what `read` needs."""

    def __init__(self, span: StoredSpan, read: Read, close: Callable[[], None]):
        self.span = span
        self.read = read
        self.close = close
        self.checksum_offsets = [0, *accumulate(span.num_blocks)]

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Read blocks of a layer, [end - begin, block_bytes]. They are valid until this thread reads again."""
        size = self.span.block_bytes
        data = self._read(self.span.offsets[layer] + begin * size, (end - begin) * size)
        return self._verify(data.reshape(-1, size), self.checksum_offsets[layer] + begin)

    def read_metadata(self) -> Bytes:
        """Read the metadata. It is valid until this thread reads again."""
        data = self._read(self.span.offsets[-2], self.span.metadata_bytes)
        metadata: Bytes = self._verify(data[None], self.checksum_offsets[-1])[0]
        return metadata

    def read_all(self) -> None:
        """Read everything. Raises CorruptionError where it differs from what was written."""
        for layer, blocks in enumerate(self.span.num_blocks):
            self.read_blocks(layer, 0, blocks)
        self.read_metadata()

    def _read(self, offset: int, size: int) -> Bytes:
        begin = self.span.data_offset + offset
        data = self.read(begin, begin + size)
        if len(data) < size:
            raise CorruptionError(f"{self.span.name} is shorter than it was written")
        return data

    def _verify(self, blocks: Bytes, first: int) -> Bytes:
        """Return blocks whose checksums are those from `first` on. Raises CorruptionError."""
        expected = np.frombuffer(self.span.checksums, np.uint64)[first : first + len(blocks)]
        if self.span.checksums and [checksum(block) for block in blocks] != expected.tolist():
            raise CorruptionError(f"{self.span.name} differs from what was written")
        return blocks
