"""What a bucket has, as this engine knows it: its files are listed, and their headers are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import nlargest
from time import monotonic
from typing import Any

from retain.garbage_collection import without_garbage_collection
from retain.kv.stores.bucket import Bucket, ObjectInfo
from retain.kv.stores.index import SpanIndex
from retain.kv.stores.span import CorruptionError, Span
from retain.kv.stores.span_file import SPAN_NAME, VersionError, read_header
from retain.kv.stores.warning_log import WarningLog
from retain.threads import reset_cpu_affinity

LIST_SECONDS = 5.0  # of listing at once; then what was found is indexed, and the listing goes on from there
LIST_STEP = 1000  # objects between two looks at the clock
NUM_THREADS = 8  # headers read at once
BATCH = 32  # headers that a thread reads in a row, at most


class Catalog:
    """The spans of a bucket's folder. Its lock guards the index, too."""

    def __init__(
        self, bucket: Bucket, folder: str, span_index: SpanIndex, max_objects: int, warnings: WarningLog, tier: str
    ):
        self.bucket = bucket
        self.folder = folder
        self.span_index = span_index
        self.max_objects = max_objects  # indexed at most: of more, the newest of each part of a listing
        self.warnings = warnings
        self.tier = tier  # its name
        self.lock = threading.Lock()
        self.span_of_name: dict[str, Span] = {}
        # Objects that are damaged, foreign, not wanted any more, or in text order beside that of importance: when they
        # were modified.
        self.unusable: dict[str, float] = {}
        self.num_damaged = 0  # headers that were read and are unusable
        self.other_version: str | None = None  # what an object of another version of the format says
        self.formats: dict[bytes, dict[str, Any]] = {}  # descriptions by fingerprint
        self.listed_to = ""  # a listing that is not complete goes on after this name
        self.latency = 0.0  # seconds that reading a header took, on average
        self.is_closed = False

    def add(self, span: Span) -> None:
        """Index a span. Of the same tokens in two orders, that of importance counts."""
        with self.lock:
            if known := self.span_of_name.get(span.name):
                self._forget(known)
            self.unusable.pop(span.name, None)
            self.span_of_name[span.name] = span
            found = self.span_index.find(span.keys[0])
            other = found[0] if found and found[0].keys == span.keys else None
            if other:
                useless = span if other.is_reordered else other
                self._forget(useless, is_unusable=True)
                if useless is span:
                    return
            self.span_index.add(span)

    def drop(self, span: Span, is_unusable: bool = False) -> bool:
        """Forget a span until a listing has it again; an unusable one until its object is written anew.

        Returns whether it was indexed.
        """
        with self.lock:
            return self._forget(span, is_unusable)

    def _forget(self, span: Span, is_unusable: bool = False) -> bool:
        if self.span_of_name.get(span.name) is span:
            del self.span_of_name[span.name]
            if is_unusable:
                self.unusable[span.name] = span.modified_at
        return self.span_index.remove(span)

    def evict(self, size: int, replaces: Span | None = None) -> int | None:
        """Forget spans until `size` bytes fit, and return their number. See `SpanIndex.make_room`."""
        with self.lock:
            victims = self.span_index.make_room(size, replaces=replaces)
            for victim in victims or ():
                self._forget(victim, is_unusable=True)
            return None if victims is None else len(victims)

    def update(self, executor: ThreadPoolExecutor) -> None:
        """List a part of the folder, forget the objects that are gone, and read the headers of new ones.

        The newest come first. A listing that fails goes on from there the next time, and what it found counts.
        """
        begin = self.listed_to
        failures = list[Exception]()
        found = nlargest(self.max_objects, self._iter_part(failures), key=lambda info: info.modified_at)
        end = self.listed_to
        is_last_part = not end and not failures
        names = {info.name for info in found}
        with self.lock:
            for name, span in list(self.span_of_name.items()):
                if name > begin and (is_last_part or name <= end) and name not in names:
                    self._forget(span)
            new = [info for info in found if info.name not in self.span_of_name and self._is_worth_reading(info)]
            new = new[: max(self.max_objects - len(self.span_of_name), 0)]
        size = min(max(len(new) // NUM_THREADS, 1), BATCH)
        for _ in executor.map(self._read_headers, [new[i : i + size] for i in range(0, len(new), size)]):
            if self.is_closed:
                break
        for failure in failures:
            raise failure

    def update_all(self) -> None:
        """Read the spans of the whole folder into the catalog, however long that takes."""
        executor = ThreadPoolExecutor(NUM_THREADS, "retain-headers", reset_cpu_affinity)
        with executor, without_garbage_collection():  # which would look at all spans again and again
            self.update(executor)
            while self.listed_to:
                self.update(executor)

    def _iter_part(self, failures: list[Exception]) -> Iterator[ObjectInfo]:
        """Yield the next objects that are named as spans, for a while. Notes how far it came, and what ended it."""
        deadline = monotonic() + LIST_SECONDS
        begin = self.listed_to
        try:
            for i, info in enumerate(self.bucket.list(self.folder, begin), 1):
                self.listed_to = info.name
                if SPAN_NAME.fullmatch(info.name):
                    yield info
                if i % LIST_STEP == 0 and monotonic() >= deadline:
                    return
            self.listed_to = ""
        except Exception as error:
            if self.listed_to == begin:  # not even the first page came: the name may be what is wrong
                self.listed_to = ""
            failures.append(error)

    def _is_worth_reading(self, info: ObjectInfo) -> bool:
        return info.modified_at > self.unusable.get(info.name, -1)

    def _read_headers(self, infos: Sequence[ObjectInfo]) -> None:
        for info in infos:
            self.read_header(info)

    def read_header(self, info: ObjectInfo) -> None:
        """Index an object by its header, or remember that it is unusable. Raises OSError where the store fails."""
        started_at = monotonic()
        try:
            span, span_format = read_header(self.bucket, info)
            self.add(span)
            self.formats.setdefault(span_format.fingerprint, span_format.description)
            self.latency = (self.latency + monotonic() - started_at) / 2
        except FileNotFoundError:
            pass  # it was deleted since
        except (CorruptionError, PermissionError) as error:
            if isinstance(error, VersionError):
                self.other_version = str(error)
            with self.lock:
                self.unusable[info.name] = info.modified_at
                self.num_damaged += 1
            self.warnings.warn(f"tier {self.tier}: an object of {self.bucket.url} is ignored", error)
