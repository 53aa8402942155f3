"""Reads spans out of the files of a store on a disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import accumulate

from retain.kv.stores.checksums import verify_blocks
from retain.kv.stores.span import IO_ALIGNMENT, CorruptionError, alloc_aligned
from retain.kv.stores.sqlite_index import StoredSpan
from retain.types import Bytes


class DiskReader:
    """Reads a span's file, and compares each block with its checksum."""

    thread_local = threading.local()  # a buffer for each thread

    def __init__(self, span: StoredSpan, fd: int, begin_read: Callable[[int], None]):
        """`begin_read` is called before each read with its number of bytes, and may wait."""
        self.span = span
        self.fd = fd
        self.begin_read = begin_read
        self.checksum_offsets = [0, *accumulate(span.num_blocks)]

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:
        """Read blocks of a layer, [end - begin, block_bytes]. They are valid until this thread reads again."""
        size = self.span.block_bytes
        first = self.checksum_offsets[layer]
        blocks = self._read(self.span.offsets[layer] + begin * size, (end - begin) * size).reshape(-1, size)
        return self._verify(blocks, first + begin)

    def read_metadata(self) -> Bytes:
        """Read the metadata. It is valid until this thread reads again."""
        data = self._read(self.span.offsets[-2], self.span.metadata_bytes)
        metadata: Bytes = self._verify(data[None], self.checksum_offsets[-1])[0]
        return metadata

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _read(self, offset: int, size: int) -> Bytes:
        skipped = offset % IO_ALIGNMENT  # direct reads start and end at multiples of it
        aligned = -(-(skipped + size) // IO_ALIGNMENT) * IO_ALIGNMENT
        if len(getattr(self.thread_local, "buffer", ())) < aligned:
            self.thread_local.buffer = alloc_aligned(aligned)
        buffer: Bytes = self.thread_local.buffer
        self.begin_read(aligned)
        if os.preadv(self.fd, [buffer[:aligned].data], offset - skipped) < skipped + size:
            raise CorruptionError(f"file {self.span.file_number} is shorter than it was written")
        return buffer[skipped : skipped + size]

    def _verify(self, blocks: Bytes, first_checksum: int) -> Bytes:
        """Return the blocks if their checksums match. Raises CorruptionError."""
        return verify_blocks(self.span.checksums, first_checksum, blocks, f"file {self.span.file_number}")
