"""A row that begins with the important tokens of a prefix, and only they are read: a sequence that was born evicted.

Before a layer looks, its newest queries look at the sketches of the probe heads (kv/importance.py); what they look at
most comes into the row's pages, and the pages of the rest go back. Spans that have not been packed are loaded whole:
what is important lies scattered there. What is not known here: how spans are found and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kv import importance
from retain.kv.fetch import Fetch, Job
from retain.kv.hot import Through
from retain.kv.importance import Notes
from retain.kv.packing import Probes
from retain.kv.sleep import Part, Sleep

Ints = NDArray[np.int32]
NOTHING = np.zeros(0, np.float32)


class Selective(Fetch):
    """What one row waits for. `layers` see everything; `pages` [M, G, n] are the row's, for all rows of the spans of
    `parts`. `keep(layer, n)` gives back all but the first n of a layer's pages.
    """

    def __init__(
        self,
        sleep: Sleep,
        probes: Probes,
        parts: Sequence[Part],
        layers: Sequence[int],
        pages: Ints,
        keep: Callable[[int, int], None],
        others: dict[int, list[Job]],
    ):
        super().__init__(sleep, others)
        self.probes, self.parts, self.pages, self.keep = probes, parts, pages, keep
        self.index = {layer: m for m, layer in enumerate(layers)}
        self.chosen: dict[int, int] = {}  # pages, by layer
        self.seen: list[NDArray[np.float32]] = []  # masses [N] of each layer
        self.notes: list[Future[Notes | None]] = []
        self.sure: dict[int, Future[Ints]] = {}
        self.read_s = 0.0
        self.now: list[Future[bool]] = []  # what somebody waits for
        self.calm = Event()  # nobody does
        self.calm.set()
        for p in parts:
            self._open(p.store, p.span, partial(sleep.open, p.store))
        if self.failed:
            return
        self.notes = [sleep.readers.submit(self._notes, p) for p in parts]
        if self.chooses:
            self.sure = {m: sleep.readers.submit(self._begin, m) for m in self.index.values()}

    @property
    def chooses(self) -> bool:
        """Or loads everything."""
        return all(p.span.packed for p in self.parts)

    def _notes(self, part: Part) -> Notes | None:
        try:
            reader = self.readers[part.span]
            notes = self.probes.notes(part.span, reader.notes(), self.sleep.kv)
            if isinstance(reader, Through):
                reader.shares = notes.shares(self.sleep.kv.page_size)
            return notes
        except Exception as error:
            self._fail(part.store, part.span, error)
            return None

    def _begin(self, m: int) -> Ints:
        """Most of what will be loaded of a layer is what was looked at most until now, and comes ahead of the queries;
        but who waits already goes first.
        """
        S = self.sleep.kv.page_size
        found = [importance.certain(n.mass[m], n.order[m], S) for f in self.notes if (n := f.result())]
        rows = np.concatenate([NOTHING, *found])
        sure = np.sort(np.argsort(-rows)[: round(importance.SURE * self.probes.ratio * len(rows))]).astype(np.int32)
        for job in self._jobs(m, sure, 0):
            self.calm.wait()
            self._read(job)
        return sure

    def wait(self, layer: int, q: Tensor) -> None:
        """Until what is important in a layer is there."""
        super().wait(layer, q)
        notes = [f.result() for f in self.notes]
        m = self.index.get(layer)
        if m is None or self.failed:
            return
        kv, probes, S = self.sleep.kv, self.probes, self.sleep.kv.page_size
        sketches = np.concatenate([n.sketches[m] for n in notes if n]).swapaxes(0, 1)  # [P, rows, bytes]
        room = self.sleep.scratch(sketches.shape[0] * sketches.shape[1])
        k = torch.from_numpy(importance.keys(sketches, S, kv.head_dim, room))  # [P, rows, S, D]
        each = [p.span.begin * S + n.order[m].astype(np.int32) for p, n in zip(self.parts, notes, strict=True) if n]
        pos = np.concatenate(each)
        wanted = np.concatenate([self._wanted(p, x) for p, x in zip(self.parts, each, strict=True)])
        q = q[-importance.QUERIES :].cpu()
        mass = importance.masses(q, k.view(len(k), -1, kv.head_dim), probes.scale, probes.heads).numpy()
        mass[:, ~wanted] = 0
        self.seen.append(mass.mean(0))
        rows, sure = np.arange(sketches.shape[1], dtype=np.int32), NOTHING.astype(np.int32)
        if self.sure:
            sure = self.sure[m].result()
            rows = importance.choose(mass, S, probes.ratio, sure)
        self.chosen[m] = len(rows)
        began = perf_counter()
        self.calm.clear()
        try:
            for job in self._jobs(m, rows[len(sure) :], len(sure)):
                self.now.append(self.sleep.urgent.submit(self._read, job))
            for future in self.now:
                future.result()
        finally:
            self.calm.set()
        self.read_s += perf_counter() - began
        if not self.failed:
            at = self.pages[m][:, : len(rows)]  # [G, n]
            self.sleep.lane.place(at, np.where(wanted, pos, -1).reshape(-1, S)[rows][None])
            self.sleep.lane.join(self.sleep.lane.mark())
            self.keep(layer, len(rows))

    def _wanted(self, part: Part, pos: Ints) -> NDArray[np.bool_]:
        """Which of a span's tokens, at these positions. (Spans may overlap, and reach beyond the text.)"""
        begin, end = ((part.span.begin + i) * self.sleep.kv.page_size for i in (part.begin, part.end))
        found: NDArray[np.bool_] = (pos >= begin) & (pos < end)
        return found

    def _jobs(self, m: int, rows: Ints, first: int) -> Iterator[Job]:
        """What reads rows of all spans, one behind the other, in order, into a layer's pages from `first` on."""
        begins = np.cumsum([0, *(p.span.rows[m] for p in self.parts)])
        parts = np.searchsorted(begins, rows, "right") - 1
        for (part, _), run in groupby(
            zip(parts.tolist(), rows.tolist(), range(len(rows)), strict=True), lambda x: (x[0], x[1] - x[2])
        ):
            found = list(run)
            (_, row, at), p = found[0], self.parts[part]
            pages = self.pages[m][:, first + at : first + at + len(found)]
            yield Job(p.store, p.span, m, row - int(begins[part]), pages.T, 0)

    @property
    def futures(self) -> list[Future[Any]]:
        """See Fetch. Who waits for notes is cancelled before they are."""
        return [*self.now, *self.sure.values(), *self.notes, *super().futures]

    @property
    def took(self) -> float:
        """See Fetch."""
        return self.read_s

    def done(self) -> bool:
        """See Fetch. What queries looked at is remembered, and packed by."""
        if not super().done():
            return False
        mass, at = np.stack(self.seen), 0  # [M, N]
        for p, future in zip(self.parts, self.notes, strict=True):
            n = p.span.rows[0] * self.sleep.kv.page_size
            if self.sleep.packs and (notes := future.result()):
                place = notes.order.argsort(axis=1)  # of every token, where it lies
                self.sleep.packs.saw(p.store, p.span, notes.mass, np.take_along_axis(mass[:, at : at + n], place, 1))
            at += n
        return True
