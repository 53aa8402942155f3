"""Pages that wake: rows of spans into a row's own pages, layer by layer while a step computes.

What is not known here: which row, which text, why these spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kv.sleep import Sleep
from retain.kv.span import Span
from retain.kv.tiers import Damaged, Reader, Store

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Job:
    """Rows of one layer of a span that are to come into pages [rows, G], from position `first` of the text on."""

    store: Store
    span: Span
    layer: int  # of the span
    begin: int
    pages: Ints
    first: int


class Fetch:
    """What one row waits for: all of it is on its way at once, the first layers of the model first.

    `failed`: something did not come, and will never.
    """

    def __init__(self, sleep: Sleep, layers: dict[int, list[Job]]):
        self.sleep, self.failed, self.stopped = sleep, False, False
        self.came: dict[str, int] = {}  # bytes, by store
        self.woken: set[tuple[Store, Span]] = set()  # that came whole
        self.begun = self.ended = perf_counter()
        self.readers: dict[Span, Reader] = {}
        for job in chain.from_iterable(layers.values()):
            self._open(job.store, job.span, job.store.open)
        sleep.lane.begin()
        self.layers: dict[int, Future[Any]] = {
            layer: sleep.readers.submit(self._run, jobs) for layer, jobs in sorted(layers.items())
        }

    def _open(self, store: Store, span: Span, opened: Callable[[Span], Reader]) -> None:
        if not self.failed and span not in self.readers:
            try:
                self.readers[span] = opened(span)
            except OSError as error:
                self._fail(store, span, error)

    def _run(self, jobs: Sequence[Job]) -> Any:
        """What who computes has to wait for."""
        for job in jobs:
            if self.failed or self.stopped or not self._read(job):
                return None
            if len(job.pages) == job.span.rows[job.layer]:
                self.woken.add((job.store, job.span))
        try:
            self.sleep.fill(jobs)
            self.ended = perf_counter()
            return self.sleep.lane.mark()
        except Exception as error:
            self._fail(jobs[0].store, jobs[0].span, error)
            return None

    def _read(self, job: Job) -> bool:
        """Whether it came. Whatever goes wrong here costs the row what it waits for, and nobody else anything."""
        if self.failed or self.stopped:
            return False
        try:
            rows = self.readers[job.span].rows(job.layer, job.begin, job.begin + len(job.pages))
            self.sleep.put(job, rows)
            self._count(job.store, rows.size)
        except Exception as error:
            self._fail(job.store, job.span, error)
        return not self.failed

    def _fail(self, store: Store, span: Span, error: Exception) -> None:
        """A span did not come: whoever has it has it no more."""
        self.failed = True
        store.drop(span, damaged=isinstance(error, Damaged))

    def wait(self, layer: int, q: Tensor) -> None:
        """Until a layer is there. (Who loads everything does not ask for what.)"""
        if layer in self.layers:
            self.sleep.lane.join(self.layers[layer].result())

    @property
    def futures(self) -> list[Future[Any]]:
        """All that was begun, what others wait for last."""
        return list(self.layers.values())

    def stop(self) -> None:
        """Nothing is written any more when this returns."""
        self.stopped = True
        try:
            wait([f for f in self.futures if not f.cancel()])
            self.sleep.lane.sync()
        finally:
            self._close()

    def _count(self, store: Store, size: int) -> None:
        self.came[store.name] = self.came.get(store.name, 0) + size

    @property
    def took(self) -> float:
        """Seconds that reading took."""
        return self.ended - self.begun

    def _close(self) -> None:
        for reader in self.readers.values():
            reader.close()

    def done(self) -> bool:
        """All layers were waited for: whether everything came. What is in the pool now sleeps no more beside it."""
        if self.failed:
            self.stop()
            return False
        self.sleep.lane.sync()  # what it came from may go now
        self._close()
        if len(self.came) == 1:
            ((name, size),) = self.came.items()
            self.sleep.rates.came(name, size, max(self.took, 1e-6))
        return True
