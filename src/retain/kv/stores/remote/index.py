"""What a bucket has, as this engine knows it: a thread lists objects and reads their headers.

Lookups never wait for the network. What the thread has not seen yet is a miss, and asks it to list again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from heapq import nlargest
from time import monotonic

from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.index import SpanIndex
from retain.kv.stores.remote.bucket import Bucket, ObjectInfo
from retain.kv.stores.remote.object_format import FIRST_READ, OBJECT_NAME, RemoteSpan, decode_header, header_size
from retain.kv.stores.span import CorruptionError, Span
from retain.kv.stores.warning_log import WarningLog
from retain.threads import reset_cpu_affinity

LIST_SECONDS = 5.0  # of listing at once; then what was found is indexed, and the listing goes on from there
LIST_STEP = 1000  # objects between two looks at the clock
MAX_OBJECTS = 100_000  # indexed at most: of more, the newest of each part of a listing
UNLIMITED = 2**62  # bytes
NUM_THREADS = 8  # headers read at once


class RemoteIndex:
    """The spans of a bucket's folder. A miss lists the folder again, at most once each `refresh` seconds.

    While the breaker is open nothing is found, and this thread probes the store by listing it.
    """

    def __init__(self, bucket: Bucket, folder: str, breaker: CircuitBreaker, refresh: float, warnings: WarningLog):
        self.bucket = bucket
        self.folder = folder
        self.breaker = breaker
        self.refresh = refresh
        self.warnings = warnings
        self.span_index = SpanIndex(UNLIMITED, "lru")
        self._lock = threading.Lock()
        self._span_of_name: dict[str, RemoteSpan] = {}
        self._unusable: dict[str, float] = {}  # damaged and foreign objects: when they were modified
        self._requested = threading.Event()
        self._is_closed = False
        self._listed = threading.Condition(self._lock)
        self._num_started = self._num_finished = 0  # listings, from the first name to the last
        self._listed_to = ""  # a listing that is not complete goes on after this name
        self._is_resumed = False  # after a failure
        self.latency = 0.0  # seconds that reading a header took, on average
        self._next_at = 0.0  # when a miss may ask for a listing again
        self._requested.set()
        self._thread = threading.Thread(target=self._run, name="retain-remote-index", daemon=True)
        self._thread.start()

    # ---- called by the engine ------------------------------------------------------------------------------------

    def find(self, key: bytes) -> tuple[Span, int] | None:
        """Return the span that has the key, and the key's index in it."""
        if self.breaker.is_open:
            self._requested.set()  # the thread begins to wait for the probe
            return None
        found = self.span_index.find(key)
        if not found and monotonic() >= self._next_at:
            self._requested.set()
        return found

    def add(self, span: RemoteSpan) -> None:
        """Index a span. In text order it does not replace the same tokens in order of importance."""
        with self._lock:
            if span.name in self._span_of_name:
                return
            self._unusable.pop(span.name, None)
            self._span_of_name[span.name] = span
            if (found := self.span_index.find(span.keys[0])) and found[0].keys == span.keys:
                if found[0].is_reordered:
                    return
                self.span_index.remove(found[0])
            self.span_index.add(span)

    def drop(self, span: RemoteSpan, is_unusable: bool) -> bool:
        """Forget a span until a listing has it again; an unusable one until its object is written anew.

        Returns whether it was indexed.
        """
        with self._lock:
            self._span_of_name.pop(span.name, None)
            if is_unusable:
                self._unusable[span.name] = span.modified_at
            return self.span_index.remove(span)

    def is_unusable(self, name: str) -> bool:
        """Whether the object of this name is damaged or foreign."""
        return name in self._unusable

    @property
    def num_unusable(self) -> int:
        """How many objects are damaged or foreign."""
        return len(self._unusable)

    def sync(self, timeout: float) -> None:
        """Wait until a listing that starts now is done, or `timeout` seconds have passed."""
        with self._listed:
            goal = self._num_started + 1
            self._requested.set()
            self._listed.wait_for(lambda: self._num_finished >= goal or self._is_closed, timeout)

    def close(self) -> None:
        """Stop the thread. One that waits for the network ends by itself later."""
        self._is_closed = True
        self._requested.set()
        with self._listed:
            self._listed.notify_all()

    # ---- run by the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        reset_cpu_affinity()
        with ThreadPoolExecutor(NUM_THREADS, "retain-remote-headers", reset_cpu_affinity) as executor:
            while not self._is_closed:
                if self._requested.wait(self.breaker.seconds_until_probe) or self.breaker.is_open:
                    self._requested.clear()
                    if not self.breaker.seconds_until_probe and not self._is_closed:
                        self._list(executor)

    def _list(self, executor: ThreadPoolExecutor) -> None:
        with self._lock:
            if self._num_started == self._num_finished:
                self._num_started += 1
        try:
            self._update(executor)
            self.breaker.close()
        except Exception as error:
            self._is_resumed = bool(self._listed_to)
            self.breaker.record_failure()
            self.warnings.warn(f"tier remote: cannot list {self.bucket.url}", error)
        else:
            if self._listed_to or self._is_resumed:  # what came since below the name that it went on from is unknown
                self._is_resumed = self._is_resumed and bool(self._listed_to)
                self._requested.set()
                return
        with self._listed:
            self._num_finished = self._num_started
            self._next_at = monotonic() + self.refresh
            self._listed.notify_all()

    def _update(self, executor: ThreadPoolExecutor) -> None:
        """List a part of the folder, forget the objects that are gone, and read the headers of new ones.

        The newest come first. A listing that fails goes on from there the next time, and what it found counts.
        """
        begin = self._listed_to
        failures = list[Exception]()
        found = nlargest(MAX_OBJECTS, self._iter_part(failures), key=lambda info: info.modified_at)
        end = self._listed_to
        is_last_part = not end and not failures
        names = {info.name for info in found}
        with self._lock:
            for name, span in list(self._span_of_name.items()):
                if name > begin and (is_last_part or name <= end) and name not in names:
                    del self._span_of_name[name]
                    self.span_index.remove(span)
            new = [info for info in found if info.name not in self._span_of_name and self._is_worth_reading(info)]
            new = new[: max(MAX_OBJECTS - len(self._span_of_name), 0)]
        for _ in executor.map(self.read_header, new):
            if self._is_closed:
                break
        for failure in failures:
            raise failure

    def _iter_part(self, failures: list[Exception]) -> Iterator[ObjectInfo]:
        """Yield the next objects that are named as spans, for a while. Notes how far it came, and what ended it."""
        deadline = monotonic() + LIST_SECONDS
        begin = self._listed_to
        try:
            for i, info in enumerate(self.bucket.list(self.folder, begin), 1):
                self._listed_to = info.name
                if OBJECT_NAME.fullmatch(info.name):
                    yield info
                if i % LIST_STEP == 0 and monotonic() >= deadline:
                    return
            self._listed_to = ""
        except Exception as error:
            if self._listed_to == begin:  # not even the first page came: the name may be what is wrong
                self._listed_to = ""
            failures.append(error)

    def _is_worth_reading(self, info: ObjectInfo) -> bool:
        return info.modified_at > self._unusable.get(info.name, -1)

    def read_header(self, info: ObjectInfo) -> None:
        """Index an object by its header, or remember that it is unusable. Raises OSError where the store fails."""
        started_at = monotonic()
        try:
            self.add(read_header(self.bucket, info))
            self.latency = (self.latency + monotonic() - started_at) / 2
        except FileNotFoundError:
            pass  # it was deleted since
        except (CorruptionError, PermissionError) as error:
            with self._lock:
                self._unusable[info.name] = info.modified_at
            self.warnings.warn(f"tier remote: an object of {self.bucket.url} is ignored", error)


def read_header(bucket: Bucket, info: ObjectInfo) -> RemoteSpan:
    """Read the span that an object holds. Raises OSError, and CorruptionError where it is none."""
    start = bucket.get(info.name, 0, min(FIRST_READ, info.size)).tobytes()
    if (size := header_size(start)) > len(start):
        start += bucket.get(info.name, len(start), size).tobytes()
    return decode_header(start, info)
