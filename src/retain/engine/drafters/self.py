"""self: draft with the target itself, perhaps requantized, on the most attended pages of its own cache.

It needs no memory of its own. The K and V of drafts are written to the slots that verification writes again, and the
drafter's tables name pages of the request: by layer and head the first page, the newest ones, and of the rest those
with the highest mass. On full caches verification collects masses for this purpose. (TriForce, arXiv 2404.11912,
selects chunks in the same way.) Sliding layers, and requests that evict, are attended to in full: they are small.
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
from retain.types import Ints


@dataclass
class Drafter:
    """Attend to `budget` slots of each head, selected every `refresh` rounds; masses fade by `decay` each round.

    `weights`: bf16, int8, int4, or auto for the target's own.
    """

    k: str = "auto"
    budget: int = 256
    weights: str = "auto"
    refresh: int = 8
    decay: float = 0.9
    _target: TargetModel | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _num_rounds: dict[Request, int] = field(default_factory=dict, init=False)  # with too many pages to use all
    _top_pages: dict[Request, NDArray[np.int64]] = field(default_factory=dict, init=False)  # [M, G, m], table indices

    def __post_init__(self) -> None:
        if self.budget < 1 or self.refresh < 1 or not 0 < self.decay <= 1:
            raise ValueError("self: budget and refresh must be at least 1, decay above 0 and at most 1")

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in a round where k is auto."""
        return 8

    def attach(self, target: TargetModel) -> None:
        """Load the requantized target, if `weights` names a quantization, and allocate the tables."""
        self._target, cache = target, target.cache
        self._runner = target.runner if self.weights == "auto" else target.load_requantized_runner(self.weights)
        N, L, G, n = cache.tables.pages.shape
        self._page_budget = min(max(self.budget // cache.page_size, 3) + 1, n)  # one more, for drafts that need a page
        self._pages: Ints = np.zeros((N, L, G, n), np.int32)
        self._counts: Ints = np.zeros((N, L, G), np.int32)
        self._device_tables = DeviceTables(self._pages, self._counts, cache.tables.window, cache.kv.device)

    def remove_request(self, request: Request) -> None:
        """Drop the selection of a request."""
        self._num_rounds.pop(request, None)
        self._top_pages.pop(request, None)

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """Set the drafts of requests, of at most the given lengths.

        A request with a long text gets none the first time: its masses, which select the pages, are collected first.
        """
        assert self._target and self._runner
        for request in self._num_rounds:
            request.score_decay = None  # no masses for requests that are not drafted for in this round
        runner, cache = self._runner, self._target.cache
        ready: list[tuple[Request, int]] = []
        written: list[Tensor] = []
        for request, limit in draft_limits:
            assert request.row is not None
            must_select = request.num_computed_tokens // cache.page_size >= self._page_budget
            request.score_decay = self.decay if must_select else None
            num_rounds = self._num_rounds[request] = self._num_rounds.get(request, -1) + must_select
            has_masses = num_rounds or not must_select
            if has_masses and cache.reserve(request.row, request.num_computed_tokens + 1 + limit):
                self._select_pages(request, limit)
                until_eviction = cache.tokens_until_eviction(request.row, request.num_computed_tokens)
                ready.append((request, min(limit, until_eviction - 1)))

        def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
            batch = self._build_batch([ready[j][0] for j in active], latest, step)
            written.append(batch.slot_mapping)
            return runner.forward(batch)

        draft_autoregressive(ready, forward)
        if written:  # verification writes these slots again
            cache.reject(torch.cat(written, -1))

    def _select_pages(self, request: Request, num_drafts: int) -> None:
        """Fill the drafter's tables of a request's row for this round."""
        assert self._target and request.row is not None
        cache, row, S = self._target.cache, request.row, self._target.cache.page_size
        tables, num_computed = cache.tables, request.num_computed_tokens
        counts = self._counts[row] = tables.counts[row]
        self._device_tables.mark_dirty(row)
        self._pages[row, :, :, : counts.max()] = tables.pages[row, :, :, : counts.max()]
        full_layers = tables.full_layers(row)
        newest = np.arange(max(num_computed - S, 0) // S, (num_computed + num_drafts) // S + 1)  # table indices
        num_top = self._page_budget - len(newest)
        is_sparse = row in cache.prefix_cache.sparse_rows
        if is_sparse or row in cache.evictors or not len(full_layers) or newest[0] <= num_top or num_top < 1:
            return
        if request not in self._top_pages or self._num_rounds[request] % self.refresh == 1:
            table = cache.kv.to_index(tables.pages[row, full_layers, :, : newest[0]])  # [M, G, n]
            mass = cache.kv.mass.index_select(0, table.flatten()).sum((1, 2)).view(table.shape)
            mass[..., 0] = torch.inf
            self._top_pages[request] = mass.topk(num_top).indices.sort().values.cpu().numpy()
        newest_of_heads = np.broadcast_to(newest, (len(full_layers), counts.shape[1], len(newest)))
        selected: NDArray[np.int64] = np.concatenate((self._top_pages[request], newest_of_heads), -1)  # [M, G, m']
        n = selected.shape[-1]
        self._pages[row, full_layers, :, :n] = np.take_along_axis(tables.pages[row, full_layers], selected, -1)
        self._counts[row, full_layers] = n

    def _build_batch(self, requests: Sequence[Request], tokens: Sequence[int], step: int) -> Batch:
        """Build the batch of one token of each request, `step` places after its computed tokens."""
        assert self._target
        batch = pack_tokens(
            self._target.cache,
            rows=[r.row for r in requests],
            first_places=[r.num_computed_tokens + step for r in requests],
            fresh=[[t] for t in tokens],
            num_logits=[1] * len(tokens),
        )
        return replace(batch, tables=self._device_tables.build_tables(batch.rows, batch.query_start_loc))
