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

from retain.engine.batch import Batch, pack_tokens
from retain.engine.drafters import TargetModel
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kv.memory.device_tables import DeviceTables

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
    _target: TargetModel | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _num_rounds: dict[Request, int] = field(default_factory=dict, init=False)
    _top_pages: dict[Request, NDArray[np.int64]] = field(
        default_factory=dict, init=False
    )  # [M, G, m], places in tables

    def __post_init__(self) -> None:
        if self.budget < 1 or self.refresh < 1 or not 0 < self.decay <= 1:
            raise ValueError("self: budget and refresh are at least 1, decay above 0 and at most 1")

    @property
    def max_draft_tokens(self) -> int:
        """See Drafter."""
        return 8

    def attach(self, target: TargetModel) -> None:
        """See Drafter."""
        self._target, cache = target, target.cache
        self._runner = target.runner if self.weights == "auto" else target.load_requantized_runner(self.weights)
        N, L, G, n = cache.tables.pages.shape
        self._page_budget = min(
            max(self.budget // cache.page_size, 3) + 1, n
        )  # one more where drafts cross into a new page
        self._pages: Ints = np.zeros((N, L, G, n), np.int32)
        self._counts: Ints = np.zeros((N, L, G), np.int32)
        self._device_tables = DeviceTables(self._pages, self._counts, cache.tables.window, cache.kv.device)

    def remove_request(self, request: Request) -> None:
        """See Drafter."""
        self._num_rounds.pop(request, None)
        self._top_pages.pop(request, None)

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """See Drafter."""
        assert self._target and self._runner
        for request in self._num_rounds:
            request.score_decay = None  # who is not asked pays for no masses
        runner, cache, ready, written = self._runner, self._target.cache, [], []
        for request, n in draft_limits:
            assert request.row is not None
            chooses = request.num_computed_tokens // cache.page_size >= self._page_budget
            request.score_decay = self.decay if chooses else None
            rounds = self._num_rounds[request] = self._num_rounds.get(request, -1) + chooses
            # The first round of who has to choose only leaves masses.
            if (rounds or not chooses) and cache.reserve(request.row, request.num_computed_tokens + 1 + n):
                self._select_pages(request, n)
                ready.append(
                    (request, min(n, cache.tokens_until_eviction(request.row, request.num_computed_tokens) - 1))
                )

        def forward(who: Sequence[int], tokens: Sequence[int], i: int) -> Tensor:
            batch = self._build_batch([ready[j][0] for j in who], tokens, i)
            written.append(batch.slot_mapping)
            return runner.forward(batch)

        draft_autoregressive(ready, forward)
        if written:  # who is verified is written again
            cache.reject(torch.cat(written, -1))

    def _select_pages(self, request: Request, num_drafts: int) -> None:
        """The row's tables for this round."""
        assert self._target and request.row is not None
        cache, row, S = self._target.cache, request.row, self._target.cache.page_size
        t = cache.tables
        counts = self._counts[row] = t.counts[row]
        self._device_tables.mark_dirty(row)
        self._pages[row, :, :, : counts.max()] = t.pages[row, :, :, : counts.max()]
        whole = t.full_layers(row)
        newest = np.arange(
            max(request.num_computed_tokens - S, 0) // S, (request.num_computed_tokens + num_drafts) // S + 1
        )  # pages
        m = self._page_budget - len(newest)
        thin = row in cache.prefix_cache.sparse_rows
        if thin or row in cache.evictors or not len(whole) or newest[0] <= m or m < 1:
            return
        if request not in self._top_pages or self._num_rounds[request] % self.refresh == 1:
            table = cache.kv.to_index(t.pages[row, whole, :, : newest[0]])  # [M, G, n]
            mass = cache.kv.mass.index_select(0, table.flatten()).sum((1, 2)).view(table.shape)
            mass[..., 0] = torch.inf
            self._top_pages[request] = mass.topk(m).indices.sort().values.cpu().numpy()
        chosen = np.broadcast_to(newest, (len(whole), counts.shape[1], len(newest)))
        seen: NDArray[np.int64] = np.concatenate((self._top_pages[request], chosen), -1)  # [M, G, room]
        self._pages[row, whole, :, : seen.shape[-1]] = np.take_along_axis(t.pages[row, whole], seen, -1)
        self._counts[row, whole] = seen.shape[-1]

    def _build_batch(self, requests: Sequence[Request], tokens: Sequence[int], i: int) -> Batch:
        """One token of each: the i-th behind what is computed."""
        assert self._target
        cache, ids = self._target.cache, [[t] for t in tokens]
        batch = pack_tokens(
            cache, [r.row for r in requests], [r.num_computed_tokens + i for r in requests], ids, [1] * len(ids)
        )
        return replace(batch, tables=self._device_tables.build_tables(batch.rows, batch.query_start_loc))
