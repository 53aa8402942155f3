"""Reads the blocks of a stored span, and compares each with its checksum; by large ranges where requests are slow."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from itertools import accumulate, pairwise
from time import monotonic

import numpy as np

from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.span import CorruptionError, Span
from retain.kv.stores.span_file import checksum
from retain.types import Bytes

RANGE_BYTES = 8 * 2**20  # of a read ahead, about

Read = Callable[[int, int], Bytes]  # bytes `begin` to `end` of the object
Fetch = Callable[[int, int], Future[Bytes]]


class SpanReader:
    """An open span. Methods raise OSError if it cannot be read, and CorruptionError if its bytes have changed.

    `read` returns bytes of its object, and `close` ends what that needs.
    """

    def __init__(self, span: Span, read: Read, close: Callable[[], None]):
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
        if self.span.checksums:
            expected = np.frombuffer(self.span.checksums, np.uint64)[first : first + len(blocks)]
            if [checksum(block) for block in blocks] != expected.tolist():
                raise CorruptionError(f"{self.span.name} differs from what was written")
        return blocks


class ReadAhead:
    """Reads bytes of a span's file.

    A read of a whole layer fetches a range of several layers, and the range after it in the background. Other reads
    fetch what they need. Bytes arrive in buffers of their own: a read that comes too late lands in no page.
    `deadline` is a time of `monotonic`; reads that are not done by then raise TimeoutError.
    """

    def __init__(self, span: Span, fetch: Fetch, breaker: CircuitBreaker, deadline: float):
        self.fetch = fetch
        self.breaker = breaker
        self.deadline = deadline
        sizes = [n * span.block_bytes for n in span.num_blocks]
        begins = [span.data_offset + offset for offset in span.offsets]
        self.layers = {(begin, begin + n) for begin, n in zip(begins, sizes, strict=False) if n}
        self.bounds = _find_bounds(begins[:-1])  # of the ranges
        self.num_unread = [0] * len(self.bounds)  # layers of each range
        for begin, _ in self.layers:
            self.num_unread[self._range_of(begin)] += 1
        self.ranges: dict[int, Future[Bytes]] = {}  # under way, or read and still needed
        self.has_read = self.has_failed = False
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end`."""
        if (begin, end) not in self.layers:
            return self._wait(self.fetch(begin, end))
        i = self._range_of(begin)
        future = self._start_range(i)
        if i + 2 < len(self.bounds):
            self._start_range(i + 1)
        data = self._wait(future)
        with self._lock:
            self.num_unread[i] -= 1
            if self.num_unread[i] <= 0:
                self.ranges.pop(i, None)
        return data[begin - self.bounds[i] : end - self.bounds[i]]

    def close(self) -> None:
        """Forget what is under way."""
        with self._lock:
            ranges = self.ranges
            self.ranges = {}
        for future in ranges.values():
            future.cancel()
        if self.has_read and not self.has_failed:
            self.breaker.reset_delay()

    def _range_of(self, position: int) -> int:
        return bisect_right(self.bounds, position) - 1

    def _start_range(self, i: int) -> Future[Bytes]:
        with self._lock:
            if i not in self.ranges:
                self.ranges[i] = self.fetch(self.bounds[i], self.bounds[i + 1])
            return self.ranges[i]

    def _wait(self, future: Future[Bytes]) -> Bytes:
        """Return what is read. Raises OSError."""
        try:
            data = future.result(timeout=min(max(self.deadline - monotonic(), 0), threading.TIMEOUT_MAX))
        except BaseException as error:
            self.has_failed = True
            if isinstance(error, TimeoutError) and not future.done():
                self.breaker.record_failure()
                raise TimeoutError("loading takes too long beside computing") from None
            raise
        self.has_read = True
        return data


def _find_bounds(begins: list[int]) -> list[int]:
    """Return where ranges begin, and the end: consecutive layers share one, up to about RANGE_BYTES."""
    bounds = begins[:1]
    for begin, end in pairwise(begins):
        if end - bounds[-1] > RANGE_BYTES and begin > bounds[-1]:
            bounds.append(begin)
    return [*bounds, begins[-1]]
