"""A row that begins with the important tokens of a prefix, and only they are read: a sequence that was born evicted.

Before a layer looks, its newest queries look at the sketches of the probe heads (kv/importance.py); what they look at
most comes into the row's pages, and the pages of the rest go back. Spans that have not been packed are loaded whole:
what is important lies scattered there. What is not known here: how spans are found and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kv import importance
from retain.kv.importance import Notes
from retain.kv.packing import Probes
from retain.kv.sleep import Fetch, Job, Part, Sleep
from retain.kv.tiers import Reader

Ints = NDArray[np.int32]


class Selective(Fetch):
    """What one row waits for. `layers` see everything; `pages` [M, G, n] are the row's, for all rows of the spans;
    tokens at positions `begin` to `end` are wanted. `cut(layer, n)` gives back all but the first n of a layer's pages.
    """

    def __init__(
        self,
        sleep: Sleep,
        probes: Probes,
        parts: Sequence[Part],
        layers: Sequence[int],
        pages: Ints,
        begin: int,
        end: int,
        cut: Callable[[int, int], None],
        others: dict[int, list[Job]],
    ):
        super().__init__(sleep, others)
        self.probes, self.parts, self.begin, self.end, self.pages, self.cut = probes, parts, begin, end, pages, cut
        self.index = {layer: m for m, layer in enumerate(layers)}
        self.chosen: dict[int, int] = {}  # pages, by layer
        self.seen: list[Tensor] = []  # masses [N] of each layer
        self.opened: list[Reader] = []
        self.notes: list[Future[Notes | None]] = []
        self.ready: dict[int, Future[tuple[Tensor, Ints] | None]] = {}
        self.read_s = 0.0
        for p in parts:
            try:
                self.opened.append(p.store.open(p.span))
            except OSError as error:
                self._fail(p.store, p.span, error)
                return
        self.notes = [sleep.readers.submit(self._notes, i) for i in range(len(parts))]
        self.ready = {m: sleep.readers.submit(self._keys, m) for m in self.index.values()}

    def _notes(self, i: int) -> Notes | None:
        part = self.parts[i]
        try:
            return self.probes.notes(part.span, self.opened[i].notes(), self.sleep.kv)
        except OSError as error:
            self._fail(part.store, part.span, error)
            return None

    def _keys(self, m: int) -> tuple[Tensor, Ints] | None:
        """What is left of the probe heads' keys in a layer, [P, N, D], and the tokens' positions [N]."""
        kv = self.sleep.kv
        notes = [f.result() for f in self.notes]
        if self.failed or self.stopped:
            return None
        sketches = np.concatenate([n.sketches[m] for n in notes if n])  # [rows, P, bytes]
        k = (
            importance.keys(sketches, kv.page_size, kv.head_dim)
            .swapaxes(0, 1)
            .reshape(self.probes.probes, -1, kv.head_dim)
        )
        begins = [p.span.begin * kv.page_size for p in self.parts]
        pos = np.concatenate([b + n.order[m].astype(np.int32) for b, n in zip(begins, notes, strict=True) if n])
        return torch.from_numpy(k), pos

    def wait(self, layer: int, q: Tensor) -> None:
        """Until what is important in a layer is there."""
        super().wait(layer, q)
        m = self.index.get(layer)
        if m is None or self.failed:
            return
        ready = self.ready[m].result()
        if ready is None:
            return
        k, pos = ready
        S, probes = self.sleep.kv.page_size, self.probes
        mass = importance.masses(q, k, probes.scale, probes.heads)
        wanted = (pos >= self.begin) & (pos < self.end)
        mass[:, torch.from_numpy(~wanted)] = 0
        rows = importance.choose(mass, S, probes.ratio) if all(p.span.packed for p in self.parts) else None
        self.seen.append(mass.mean(0))
        rows = np.arange(len(pos) // S, dtype=np.int32) if rows is None else rows
        self.chosen[m] = len(rows)
        if self._load(m, rows) and not self.failed:
            at = self.pages[m][:, : len(rows)]  # [G, n]
            self.sleep.kv.pos.numpy()[at] = np.where(wanted, pos, -1).reshape(-1, S)[rows][None]
            self.cut(layer, len(rows))

    def _load(self, m: int, rows: Ints) -> bool:
        """Rows of all spans, one behind the other, into the first pages of a layer. Whether they came."""
        began = perf_counter()
        begins = np.cumsum([0, *(p.span.rows[m] for p in self.parts)])
        futures: list[Future[None]] = []
        for _, run in groupby(
            enumerate(rows.tolist()), lambda x: (np.searchsorted(begins, x[1], "right"), x[1] - x[0])
        ):
            found = list(run)
            (i, first), n = found[0], len(found)
            part = int(np.searchsorted(begins, first, "right")) - 1
            p, skip = self.parts[part], first - int(begins[part])
            job = Job(p.store, p.span, m, skip, self.pages[m][:, i : i + n].T, 0)
            futures.append(self.sleep.readers.submit(self._read, part, job))
        for future in futures:
            future.result()
        self.read_s += perf_counter() - began
        return not self.failed

    def _read(self, part: int, job: Job) -> None:
        if self.failed or self.stopped:
            return
        try:
            rows = self.opened[part].rows(job.layer, job.begin, job.begin + len(job.pages))
        except OSError as error:
            return self._fail(job.store, job.span, error)
        self.sleep.put(job, rows)
        self._count(job.store, rows.size)

    def stop(self) -> None:
        """See Fetch."""
        self.stopped = True
        futures: list[Future[Any]] = [*self.notes, *self.ready.values()]
        for future in futures:
            if not future.cancel():
                future.result()
        super().stop()

    def _close(self) -> None:
        super()._close()
        for reader in self.opened:
            reader.close()

    @property
    def took(self) -> float:
        """See Fetch."""
        return self.read_s

    def done(self) -> bool:
        """See Fetch. What queries looked at is remembered, and packed by."""
        if not super().done():
            return False
        mass, at = torch.stack(self.seen).numpy(), 0  # [M, N]
        for p, future in zip(self.parts, self.notes, strict=True):
            n = p.span.rows[0] * self.sleep.kv.page_size
            if notes := future.result():
                place = notes.order.argsort(axis=1)  # of every token, where it lies
                self.sleep.packs.saw(p, notes.mass, np.take_along_axis(mass[:, at : at + n], place, 1))
            at += n
        return True
