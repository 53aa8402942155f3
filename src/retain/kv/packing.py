"""Notes of spans (kv/importance.py): made when a span is born, and anew when its tokens are packed by importance.

A packed span has in every layer the tokens first that were looked at most, so that what is important to the next text
lies side by side, and is read alone. What is not known here: who looks, where spans lie.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import KV
from retain.kv import importance
from retain.kv.importance import Notes
from retain.kv.span import Bytes, Span, blocks, unbound
from retain.kv.tiers import Damaged, Reader, Store

Ints = NDArray[np.int32]
AGAIN = 16  # wakings of a span after which it is packed anew, and that its running averages remember


@dataclass(frozen=True)
class Probes:
    """Who says what is loaded, a `ratio` of the tokens. `scale`: of attention scores; `heads`: kv heads; all of them
    pages of `backend`.
    """

    ratio: float
    scale: float
    heads: int
    backend: ModuleType

    @property
    def probes(self) -> int:
        """Heads that are asked."""
        return min(importance.PROBES, self.heads)

    def notes(self, span: Span, data: Bytes, kv: KV) -> Notes:
        """A span's, from their bytes."""
        M, n = len(span.rows), len(span.keys)
        return importance.read(data, M, n, self.probes, kv.page_size, kv.head_dim)

    def born(self, kv: KV, rows: Sequence[Ints]) -> Notes:
        """Of pages [n, G] of each layer, as they were computed."""
        S, M, n = kv.page_size, len(rows), len(rows[0])
        pages = kv.index(np.stack([r[:, : self.probes] for r in rows]))  # [M, n, P]
        k, _ = self.backend.read(kv, pages.flatten())
        order = np.broadcast_to(np.arange(n * S, dtype=np.uint16), (M, n * S))
        found = importance.sketches(k.reshape(*pages.shape, S, -1).cpu())
        return Notes(found, order, np.zeros((M, n * S), np.float32))

    def size(self, layers: int, rows: int, kv: KV) -> int:
        """Of notes, in bytes."""
        return importance.size(layers, rows, self.probes, kv.page_size, kv.head_dim)


class Packs:
    """What queries looked at in spans; and spans that are packed anew by it, in the background."""

    def __init__(self, probes: Probes, kv: KV):
        self.probes, self.kv = probes, kv
        # Running averages [M, n S], of how many. Spans that are nowhere any more are forgotten.
        self.seen: MutableMapping[Span, tuple[NDArray[np.float32], int]] = WeakKeyDictionary()
        self.packer = ThreadPoolExecutor(1, "retain-pack", unbound)
        self.running: set[Span] = set()

    def saw(self, store: Store, span: Span, before: NDArray[np.float32], mass: NDArray[np.float32]) -> None:
        """Some queries left this mass on the tokens of a span [M, n S]; `before`: what its notes say."""
        average, n = self.seen.get(span, (before, AGAIN if span.packed else 0))
        weight = 1 / min(n + 1, AGAIN)
        n = n + 1
        self.seen[span] = (1 - weight) * average + weight * mass, n
        if span not in self.running and (not span.packed or n >= 2 * AGAIN):
            self.running.add(span)
            self.packer.submit(self._pack, store, span)

    def _pack(self, store: Store, span: Span) -> None:
        mass, _ = self.seen.pop(span, (np.zeros(0, np.float32), 0))
        try:
            with closing(store.open(span)) as reader:
                new, data = packed(self.probes, self.kv, span, reader, mass)
                store.keep(new, data, instead=span)
        except OSError as error:
            store.drop(span, damaged=isinstance(error, Damaged))
        self.running.discard(span)

    def sync(self) -> None:
        """Wait until what was to be packed is."""
        self.packer.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what was begun."""
        self.packer.shutdown()


def packed(probes: Probes, kv: KV, span: Span, reader: Reader, mass: NDArray[np.float32]) -> tuple[Span, Bytes]:
    """A span with the tokens of every layer in the order of their masses [M, n S], the largest first; and its bytes."""
    S, M, n, G = kv.page_size, len(span.rows), len(span.keys), probes.heads
    notes = probes.notes(span, reader.notes(), kv)
    order = np.argsort(-mass, axis=1, kind="stable").astype(np.uint16)
    new = Span(
        span.keys, span.rows, span.row_bytes, span.begin, hits=span.hits, used=span.used, notes=span.notes, packed=True
    )
    data = blocks(new.size)
    two = probes.backend.allocate(1 + 2 * n * G, S, kv.head_dim, kv.dtype, 1)  # pages as they are, and as they will be
    raw = [x.flatten(1).view(torch.uint8).numpy() for x in (two.k, two.v)]
    before, after = (np.arange(n * G).reshape(n, G) + 1 + i * n * G for i in (0, 1))
    sketches = []
    for m in range(M):
        given = reader.rows(m, 0, n).reshape(n, G, 2, -1)
        for i, x in enumerate(raw):
            x[before] = given[:, :, i]
        two.pos[:] = 0
        place = np.empty(n * S, np.int64)
        place[notes.order[m]] = np.arange(n * S)  # of each token, where it lies
        src, dst = (_slots(x, at, S) for x, at in ((before, place[order[m]]), (after, np.arange(n * S))))
        probes.backend.move(two, src, dst)
        out = new.of(data, m).reshape(n, G, 2, -1)
        for i, x in enumerate(raw):
            out[:, :, i] = x[after]
        k, _ = probes.backend.read(two, torch.from_numpy(after[:, : probes.probes]).flatten())
        sketches.append(importance.sketches(k.reshape(n, probes.probes, S, -1)))
    told = Notes(np.stack(sketches), order, mass.astype(np.float32)).bytes
    data[new.begins[-2] : new.begins[-2] + len(told)] = told
    return new, data


def _slots(pages: NDArray[np.int64], places: NDArray[np.int64], page_size: int) -> Tensor:
    """Of places in the heads' tables, pages [n, G]: [G, n S], int32."""
    return torch.from_numpy((pages.T[:, places // page_size] * page_size + places % page_size).astype(np.int32))
