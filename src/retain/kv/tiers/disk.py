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
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from retain.config import Size, one_of
from retain.kv.ledger import Filed, Ledger, checksum
from retain.kv.span import BLOCK, Bytes, Held, Shelf, Span, blocks, unbound
from retain.kv.tiers import Damaged

QUEUE = 2**29  # bytes that may wait to be written


@dataclass(frozen=True)
class Tier:
    """Options. Raises ValueError."""

    path: str
    capacity: Size
    evict: str = "lru"  # or lfu
    read: Size | None = None  # bytes a second, at most

    def __post_init__(self) -> None:
        one_of("evict", self.evict, "lru", "lfu")
        if self.read is not None and self.read < 1:
            raise ValueError("read is at least 1 byte a second")

    def open(self) -> Disk:
        """See `tiers.Tier`."""
        return Disk(self)


class Disk:
    """See `tiers.Store`. One thread writes, and only it touches the ledger."""

    name, most, replica = "disk", 16, True

    def __init__(self, chosen: Tier):
        self.chosen, self.shelf = chosen, Shelf(chosen.capacity, chosen.evict)
        self.counts = dict.fromkeys(("written", "read", "evicted", "damaged", "failed", "skipped"), 0)
        self.guard = threading.Lock()  # of all that follows, and of the shelf
        self.queued, self.pending, self.wanted = 0, set[bytes](), set[Filed]()
        self.free_at = 0.0  # when the next read may begin, where they are slowed down
        self.ledger = Ledger(Path(chosen.path).expanduser())
        self.last = 0  # number of a file
        try:
            self._recover()
        except sqlite3.Error as error:
            self.ledger.close()
            raise OSError(f"the store {self.ledger.path} cannot be opened: {error}") from None
        self.writer = ThreadPoolExecutor(1, "retain-disk", _background)

    def _recover(self) -> None:
        """Know what is there, the last used first, as far as the capacity goes."""
        over = []
        for span in self.ledger.spans():
            if span and self.shelf.bytes + span.size <= self.chosen.capacity:
                self.shelf.add(span)
            elif span:
                over.append(span.number)
            self.last = max(self.last, span.number if span else 0)
            self.counts["damaged"] += span is None
        self.ledger.forget(over)

    # ---- what the engine asks ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:  # noqa: D102
        return self.shelf.find(key)

    def touch(self, spans: Sequence[Span]) -> None:  # noqa: D102
        with self.guard:
            self.shelf.touch(spans)
            self.wanted |= {s for s in spans if isinstance(s, Filed)}

    def has(self, key: bytes) -> bool:  # noqa: D102
        return key in self.pending or self.shelf.find(key) is not None

    def wants(self, size: int) -> bool:  # noqa: D102
        if size > self.shelf.capacity:
            return False
        full = self.queued + size > QUEUE
        self.counts["skipped"] += full
        return not full

    def keep(self, span: Span, data: Bytes, instead: Span | None = None) -> None:  # noqa: D102
        with self.guard:
            self.pending |= set(span.keys)
            self.queued += span.size
        self.writer.submit(self._write, span, data, instead)

    def open(self, span: Span) -> File:  # noqa: D102
        assert isinstance(span, Filed)
        return File(self, span, _direct(self.ledger.file(span.number), os.O_RDONLY))

    def drop(self, span: Span, damaged: bool = False) -> None:  # noqa: D102
        assert isinstance(span, Filed)
        with self.guard:
            there = self.shelf.remove(span)
            self.counts["damaged"] += damaged and there
        if there:
            self.writer.submit(self._try, lambda: self.ledger.forget([span.number]))

    def told(self) -> dict[str, Any]:  # noqa: D102
        return {"tier": self.name, **self.shelf.told(), **self.counts}

    def sync(self) -> None:  # noqa: D102
        self.writer.submit(lambda: None).result()

    def verify(self) -> int:
        """Read everything; what is not whole goes. How many spans that were."""
        bad = 0
        for span in self.shelf:
            try:
                with closing(self.open(span)) as file:
                    for layer, rows in enumerate(span.rows):
                        file.rows(layer, 0, rows)
                    file.notes()
            except OSError:
                self.drop(span, damaged=True)
                bad += 1
        return bad

    def clear(self) -> None:
        """Drop everything."""
        for span in self.shelf:
            self.drop(span)

    def close(self) -> None:  # noqa: D102
        self.writer.submit(self._try, self._remember)
        try:
            self.writer.shutdown()
        finally:
            self.ledger.close()

    # ---- what the writer does ------------------------------------------------------------------------------------

    def _write(self, span: Span, data: Bytes, instead: Span | None) -> None:
        self._try(lambda: self._publish(span, data, instead))  # whatever happens:
        with self.guard:
            self.queued -= span.size
            self.pending -= set(span.keys)
        self._try(self._remember)

    def _remember(self) -> None:
        with self.guard:
            wanted, self.wanted = self.wanted, set()
        self.ledger.remember(list(wanted))

    def _try(self, work: Callable[[], None]) -> None:
        """A disk that is full, or broken, costs what was to be kept, and nothing else."""
        try:
            work()
        except Exception:
            self.counts["failed"] += 1

    def _publish(self, span: Span, data: Bytes, instead: Span | None) -> None:
        with self.guard:
            if instead and instead not in self.shelf.spans:
                return  # it was dropped, or somebody was here before
            kept = instead.size if instead else 0  # its place will be free
            gone = self.shelf.room(span.size - kept)
            if gone and instead in gone:
                gone += self.shelf.room(span.size) or []
        if gone is None:
            return
        self.counts["evicted"] += len(gone)
        self.ledger.forget([s.number for s in gone if isinstance(s, Filed)])
        self.last += 1
        sums = [checksum(row) for layer in range(len(span.rows)) for row in span.of(data, layer)]
        sums.append(checksum(Held(span, data).notes()))
        given = {f.name: getattr(span, f.name) for f in fields(Span) if f.name not in ("data", "share")}
        filed = Filed(**given, number=self.last, sums=np.array(sums, np.uint64).tobytes(), made=span.used)
        file = self.ledger.file(filed.number)
        draft = file.with_suffix(".tmp")
        try:
            _save(draft, data)
            draft.rename(file)
            _sync(file.parent)
            self.ledger.add(filed, instead.number if isinstance(instead, Filed) else None)
        except BaseException:
            for left in (draft, file):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise
        with self.guard:
            self.counts["written"] += span.size
            self.shelf.add(filed)
            if instead:
                self.shelf.remove(instead)

    def slow(self, size: int) -> None:
        """Wait until so many bytes may have been read, and count them."""
        with self.guard:
            self.counts["read"] += size
            if not self.chosen.read:
                return
            self.free_at = ready = max(monotonic(), self.free_at) + size / self.chosen.read
        sleep(max(ready - monotonic(), 0))


class File:
    """See `tiers.Reader`."""

    own = threading.local()  # a buffer for each thread

    def __init__(self, disk: Disk, span: Filed, fd: int):
        self.disk, self.span, self.fd = disk, span, fd
        self.sums = np.frombuffer(span.sums, np.uint64)
        self.firsts = [0, *accumulate(span.rows)]

    def rows(self, layer: int, begin: int, end: int) -> Bytes:  # noqa: D102
        size, first = self.span.row_bytes, self.firsts[layer]
        found = self._read(self.span.begins[layer] + begin * size, (end - begin) * size).reshape(-1, size)
        return self._checked(found, first + begin)

    def notes(self) -> Bytes:  # noqa: D102
        found: Bytes = self._checked(self._read(self.span.begins[-2], self.span.notes)[None], self.firsts[-1])[0]
        return found

    def close(self) -> None:  # noqa: D102
        os.close(self.fd)

    def _read(self, at: int, size: int) -> Bytes:
        before = at % BLOCK  # direct reads begin and end at blocks
        whole = -(-(before + size) // BLOCK) * BLOCK
        if len(getattr(self.own, "buffer", ())) < whole:
            self.own.buffer = blocks(whole)
        buffer: Bytes = self.own.buffer
        self.disk.slow(whole)
        if os.preadv(self.fd, [buffer[:whole].data], at - before) < before + size:
            raise Damaged(f"file {self.span.number} was cut")
        return buffer[before : before + size]

    def _checked(self, found: Bytes, first: int) -> Bytes:
        """Rows, if they are what was written."""
        if [checksum(row) for row in found] != self.sums[first : first + len(found)].tolist():
            raise Damaged(f"file {self.span.number} is not what was written")
        return found


def _background() -> None:
    """This thread gives way to those that compute."""
    unbound()
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _direct(path: Path, flags: int) -> int:
    """Open a file past the page cache, where the file system can."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, flags, 0o600)


def _save(path: Path, data: Bytes) -> None:
    fd = _direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        at = 0
        while at < len(data):
            at += os.pwritev(fd, [data[at : at + 2**24].data], at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
