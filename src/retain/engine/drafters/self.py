"""The model itself, perhaps with smaller weights, on a few pages of its own cache: those that are looked at most.

Nothing is computed or kept for it. A draft's keys and values come into the slots that verification then writes, and its
tables name pages that are the request's own: by layer and head the first page, the newest ones, and the best of the
rest by the mass that verification leaves on full caches for this purpose. (A page is the unit: TriForce, arXiv
2404.11912, chooses chunks too.) Layers that slide, and requests that forget, are looked at whole: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.engine.ahead import guess
from retain.engine.batch import Batch, flat
from retain.engine.drafters import Target
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kernels import NO_WINDOW
from retain.kv.mirror import Mirror

Ints = NDArray[np.int32]


@dataclass
class Drafter:
    """`budget` slots a head, chosen anew after `refresh` rounds, by masses that fade by `decay` a round.

    `weights`: bf16, int8, int4, or auto, the model's own.
    """

    k: str = "auto"
    budget: int = 256
    weights: str = "auto"
    refresh: int = 8
    decay: float = 0.9
    _target: Target | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _rounds: dict[Request, int] = field(default_factory=dict, init=False)
    _best: dict[Request, NDArray[np.int64]] = field(default_factory=dict, init=False)  # [M, G, m], places in tables

    def __post_init__(self) -> None:
        if self.budget < 1 or self.refresh < 1 or not 0 < self.decay <= 1:
            raise ValueError("self: budget and refresh are at least 1, decay above 0 and at most 1")

    @property
    def most(self) -> int:
        """See Drafter."""
        return 8

    def join(self, target: Target) -> None:
        """See Drafter."""
        self._target, cache = target, target.cache
        self._runner = target.runner if self.weights == "auto" else target.lighter(self.weights)
        n_rows, L, G, n = cache.pages.shape
        self._room = min(max(self.budget // cache.page_size, 3) + 1, n)  # one more where drafts cross into a new page
        self._pages: Ints = np.zeros((n_rows, L, G, n), np.int32)
        self._counts: Ints = np.zeros((n_rows, L, G), np.int32)
        self._mirror = Mirror(self._pages, self._counts, cache.window, cache.kv.device)

    def drop(self, request: Request) -> None:
        """See Drafter."""
        self._rounds.pop(request, None)
        self._best.pop(request, None)

    def propose(self, asked: Sequence[tuple[Request, int]]) -> None:
        """See Drafter."""
        assert self._target and self._runner
        for request in self._rounds:
            request.fade = None  # who is not asked pays for no masses
        runner, cache, ready, written = self._runner, self._target.cache, [], []
        for request, n in asked:
            assert request.row is not None
            chooses = request.computed // cache.page_size >= self._room
            request.fade = self.decay if chooses else None
            rounds = self._rounds[request] = self._rounds.get(request, -1) + chooses
            # The first round of who has to choose only leaves masses.
            if (rounds or not chooses) and cache.grow(request.row, request.computed + 1 + n):
                self._choose(request, n)
                ready.append((request, min(n, cache.stretch(request.row, request.computed) - 1)))

        def forward(who: Sequence[int], tokens: Sequence[int], i: int) -> Tensor:
            batch = self._batch([ready[j][0] for j in who], tokens, i)
            written.append(batch.slots)
            return runner.forward(batch)

        guess(ready, forward)
        if written:  # who is verified is written again
            cache.reject(torch.cat(written, -1))

    def _choose(self, request: Request, n: int) -> None:
        """The row's tables for this round."""
        assert self._target and request.row is not None
        cache, row, S = self._target.cache, request.row, self._target.cache.page_size
        counts = self._counts[row] = cache.counts[row]
        self._mirror.touch(row)
        self._pages[row, :, :, : counts.max()] = cache.pages[row, :, :, : counts.max()]
        whole = np.flatnonzero(cache.window[row] == NO_WINDOW)
        newest = np.arange(max(request.computed - S, 0) // S, (request.computed + n) // S + 1)  # pages
        m = self._room - len(newest)
        thin = cache.reuse is not None and row in cache.reuse.thin
        if thin or row in cache.keepers or not len(whole) or newest[0] <= m or m < 1:
            return
        if request not in self._best or self._rounds[request] % self.refresh == 1:
            table = cache.kv.index(cache.pages[row, whole, :, : newest[0]])  # [M, G, n]
            mass = cache.kv.mass.index_select(0, table.flatten()).sum((1, 2)).view(table.shape)
            mass[..., 0] = torch.inf
            self._best[request] = mass.topk(m).indices.sort().values.cpu().numpy()
        chosen = np.broadcast_to(newest, (len(whole), counts.shape[1], len(newest)))
        seen: NDArray[np.int64] = np.concatenate((self._best[request], chosen), -1)  # [M, G, room]
        self._pages[row, whole, :, : seen.shape[-1]] = np.take_along_axis(cache.pages[row, whole], seen, -1)
        self._counts[row, whole] = seen.shape[-1]

    def _batch(self, requests: Sequence[Request], tokens: Sequence[int], i: int) -> Batch:
        """One token of each: the i-th behind what is computed."""
        assert self._target
        cache, ids = self._target.cache, [[t] for t in tokens]
        batch = flat(cache, [r.row for r in requests], [r.computed + i for r in requests], ids, [1] * len(ids))
        return replace(batch, tables=self._mirror.tables(batch.rows, batch.starts))
