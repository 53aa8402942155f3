"""Checksums of spans: one for each block of each layer in order, then one for the metadata."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

from retain.kv.stores.span import CorruptionError, Span
from retain.types import Bytes


def checksum(data: bytes | Bytes) -> int:
    """Return a 64-bit checksum (xxHash3)."""
    return xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)


def span_checksums(span: Span, data: Bytes) -> bytes:
    """Return the checksums of a span's bytes, 64 bits each."""
    sums = [checksum(block) for layer in range(len(span.num_blocks)) for block in span.view_layer(data, layer)]
    return np.array([*sums, checksum(span.view_metadata(data))], np.uint64).tobytes()


def verify_blocks(checksums: bytes, first: int, blocks: Bytes, source: str) -> Bytes:
    """Return blocks [n, size] whose checksums are those from `first` on. Raises CorruptionError that names `source`."""
    expected = np.frombuffer(checksums, np.uint64)[first : first + len(blocks)]
    if [checksum(block) for block in blocks] != expected.tolist():
        raise CorruptionError(f"{source} differs from what was written")
    return blocks
