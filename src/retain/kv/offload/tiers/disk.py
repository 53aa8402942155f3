"""A folder on a disk: everything that was computed, bounded, there again after a restart.

A span's file is written whole, synced and renamed before its row in the index (kv/ledger.py) publishes it: who is
killed in between leaves a file that nobody knows, and the next to open the store removes it. Files are read and written
past the page cache, where the file system lets us: what is worth memory has a tier of its own. What is not known here:
who asks, and for what.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from retain.kv.offload.index import SpanIndex
from retain.kv.offload.span import IO_ALIGNMENT, CorruptionError, MemoryReader, Span, alloc_aligned
from retain.kv.offload.sqlite_index import StoredSpan, StoreIndex, checksum
from retain.plugins import Size, check_choice
from retain.threads import reset_cpu_affinity
from retain.types import Bytes

MAX_QUEUED_BYTES = 2**29  # bytes that may wait to be written


@dataclass(frozen=True)
class Tier:
    """Options. Raises ValueError."""

    path: str
    capacity: Size
    evict: str = "lru"  # or lfu
    read: Size | None = None  # bytes a second, at most

    def __post_init__(self) -> None:
        check_choice("evict", self.evict, "lru", "lfu")
        if self.read is not None and self.read < 1:
            raise ValueError("read is at least 1 byte a second")

    def open(self) -> DiskStore:
        """See `tiers.Tier`."""
        return DiskStore(self)


class DiskStore:
    """See `tiers.Store`. One thread writes, and only it touches the ledger."""

    name, max_keys, write_through = "disk", 16, True

    def __init__(self, options: Tier):
        self.options, self.span_index = options, SpanIndex(options.capacity, options.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted", "damaged", "failed", "skipped"), 0)
        self._lock = threading.Lock()  # of all that follows, and of the shelf
        self._queued_bytes, self._in_flight_keys, self._touched_spans = 0, set[bytes](), set[StoredSpan]()
        self._next_read_at = 0.0  # when the next read may begin, where they are slowed down
        self.store_index = StoreIndex(Path(options.path).expanduser())
        self._last_file_number = 0  # number of a file
        try:
            self._recover()
        except sqlite3.Error as error:
            self.store_index.close()
            raise OSError(f"the store {self.store_index.path} cannot be opened: {error}") from None
        self.writer = ThreadPoolExecutor(1, "retain-disk", _init_writer_thread)

    def _recover(self) -> None:
        """Know what is there, the last used first, as far as the capacity goes."""
        over = []
        for span in self.store_index.load_spans():
            if span and self.span_index.used_bytes + span.size <= self.options.capacity:
                self.span_index.add(span)
            elif span:
                over.append(span.file_number)
            self._last_file_number = max(self._last_file_number, span.file_number if span else 0)
            self.counts["damaged"] += span is None
        self.store_index.delete(over)

    # ---- what the engine asks ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:  # noqa: D102
        return self.span_index.find(key)

    def touch(self, spans: Sequence[Span]) -> None:  # noqa: D102
        with self._lock:
            self.span_index.touch(spans)
            self._touched_spans |= {s for s in spans if isinstance(s, StoredSpan)}

    def contains(self, key: bytes) -> bool:  # noqa: D102
        return key in self._in_flight_keys or self.span_index.find(key) is not None

    def accepts(self, size: int) -> bool:  # noqa: D102
        if size > self.span_index.capacity:
            return False
        full = self._queued_bytes + size > MAX_QUEUED_BYTES
        self.counts["skipped"] += full
        return not full

    def put(self, span: Span, data: Bytes, replaces: Span | None = None) -> None:  # noqa: D102
        with self._lock:
            self._in_flight_keys |= set(span.keys)
            self._queued_bytes += span.size
        self.writer.submit(self._write, span, data, replaces)

    def open(self, span: Span) -> DiskReader:  # noqa: D102
        assert isinstance(span, StoredSpan)
        return DiskReader(self, span, _open_direct(self.store_index.file_path(span.file_number), os.O_RDONLY))

    def delete(self, span: Span, is_corrupted: bool = False) -> None:  # noqa: D102
        assert isinstance(span, StoredSpan)
        with self._lock:
            there = self.span_index.remove(span)
            self.counts["damaged"] += is_corrupted and there
        if there:
            self.writer.submit(self._run_counting_failures, lambda: self.store_index.delete([span.file_number]))

    def stats(self) -> dict[str, Any]:  # noqa: D102
        return {"tier": self.name, **self.span_index.stats(), **self.counts}

    def sync(self) -> None:  # noqa: D102
        self.writer.submit(lambda: None).result()

    def verify(self) -> int:
        """Read everything; what is not whole goes. How many spans that were."""
        bad = 0
        for span in self.span_index:
            try:
                with closing(self.open(span)) as file:
                    for layer, rows in enumerate(span.num_blocks):
                        file.read_blocks(layer, 0, rows)
                    file.read_metadata()
            except OSError:
                self.delete(span, is_corrupted=True)
                bad += 1
        return bad

    def clear(self) -> None:
        """Drop everything."""
        for span in self.span_index:
            self.delete(span)

    def close(self) -> None:  # noqa: D102
        self.writer.submit(self._run_counting_failures, self._update_usage)
        try:
            self.writer.shutdown()
        finally:
            self.store_index.close()

    # ---- what the writer does ------------------------------------------------------------------------------------

    def _write(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        self._run_counting_failures(lambda: self._publish(span, data, replaces))  # whatever happens:
        with self._lock:
            self._queued_bytes -= span.size
            self._in_flight_keys -= set(span.keys)
        self._run_counting_failures(self._update_usage)

    def _update_usage(self) -> None:
        with self._lock:
            wanted, self._touched_spans = self._touched_spans, set()
        self.store_index.update_usage(list(wanted))

    def _run_counting_failures(self, task: Callable[[], None]) -> None:
        """A disk that is full, or broken, costs what was to be kept, and nothing else."""
        try:
            task()
        except Exception:
            self.counts["failed"] += 1

    def _publish(self, span: Span, data: Bytes, replaces: Span | None) -> None:
        with self._lock:
            if replaces and replaces not in self.span_index.spans:
                return  # it was dropped, or somebody was here before
            kept = replaces.size if replaces else 0  # its place will be free
            gone = self.span_index.make_room(span.size - kept)
            if gone and replaces in gone:
                gone += self.span_index.make_room(span.size) or []
        if gone is None:
            return
        self.counts["evicted"] += len(gone)
        self.store_index.delete([s.file_number for s in gone if isinstance(s, StoredSpan)])
        self._last_file_number += 1
        sums = [checksum(row) for layer in range(len(span.num_blocks)) for row in span.view_layer(data, layer)]
        sums.append(checksum(MemoryReader(span, data).read_metadata()))
        filed = StoredSpan.from_span(span, self._last_file_number, np.array(sums, np.uint64).tobytes())
        file = self.store_index.file_path(filed.file_number)
        draft = file.with_suffix(".tmp")
        try:
            _write_file(draft, data)
            draft.rename(file)
            _fsync_folder(file.parent)
            self.store_index.add(filed, replaces.file_number if isinstance(replaces, StoredSpan) else None)
        except BaseException:
            for left in (draft, file):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise
        with self._lock:
            self.counts["written"] += span.size
            self.span_index.add(filed)
            if replaces:
                self.span_index.remove(replaces)

    def throttle(self, num_bytes: int) -> None:
        """Wait until so many bytes may have been read, and count them."""
        with self._lock:
            self.counts["read"] += num_bytes
            if not self.options.read:
                return
            self._next_read_at = ready = max(monotonic(), self._next_read_at) + num_bytes / self.options.read
        sleep(max(ready - monotonic(), 0))


class DiskReader:
    """See `tiers.Reader`."""

    thread_local = threading.local()  # a buffer for each thread

    def __init__(self, store: DiskStore, span: StoredSpan, fd: int):
        self.store, self.span, self.fd = store, span, fd
        self.checksums = np.frombuffer(span.checksums, np.uint64)
        self.checksum_offsets = [0, *accumulate(span.num_blocks)]

    def read_blocks(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        size, first = self.span.block_bytes, self.checksum_offsets[layer]
        found = self._read(self.span.offsets[layer] + begin * size, (end - begin) * size).reshape(-1, size)
        return self._verify(found, first + begin)

    def read_metadata(self) -> Bytes:  # noqa: D102
        found: Bytes = self._verify(
            self._read(self.span.offsets[-2], self.span.metadata_bytes)[None], self.checksum_offsets[-1]
        )[0]
        return found

    def close(self) -> None:  # noqa: D102
        os.close(self.fd)

    def _read(self, offset: int, size: int) -> Bytes:
        before = offset % IO_ALIGNMENT  # direct reads begin and end at blocks
        whole = -(-(before + size) // IO_ALIGNMENT) * IO_ALIGNMENT
        if len(getattr(self.thread_local, "buffer", ())) < whole:
            self.thread_local.buffer = alloc_aligned(whole)
        buffer: Bytes = self.thread_local.buffer
        self.store.throttle(whole)
        if os.preadv(self.fd, [buffer[:whole].data], offset - before) < before + size:
            raise CorruptionError(f"file {self.span.file_number} was cut")
        return buffer[before : before + size]

    def _verify(self, blocks: Bytes, first_checksum: int) -> Bytes:
        """Rows, if they are what was written."""
        if [checksum(row) for row in blocks] != self.checksums[first_checksum : first_checksum + len(blocks)].tolist():
            raise CorruptionError(f"file {self.span.file_number} is not what was written")
        return blocks


def _init_writer_thread() -> None:
    """This thread gives way to those that compute."""
    reset_cpu_affinity()
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _open_direct(path: Path, flags: int) -> int:
    """Open a file past the page cache, where the file system can."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, flags, 0o600)


def _write_file(path: Path, data: Bytes) -> None:
    fd = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        at = 0
        while at < len(data):
            at += os.pwritev(fd, [data[at : at + 2**24].data], at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
