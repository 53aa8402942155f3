"""self: draft with the target itself, perhaps requantized, on a few pages or on a quantized copy of its own cache.

The K and V of drafts are written to the slots that verification writes again. The drafter has tables of its own:

* By layer and head they name the first page of the request, the newest ones, and of the rest those with the highest
  mass. On full caches verification collects masses for this purpose. (TriForce, arXiv 2404.11912, selects chunks in the
  same way.) This needs no memory.
* With `dtype` they name the newest pages, and a copy of all older tokens in slots of fewer bits, in free pages of the
  pool. (As QuantSpec, arXiv 2502.10424.) A request gets no drafts before its copy is complete, and without room for it.

Sliding layers, and requests that evict, are attended to in full: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.engine.batch import pack_tokens
from retain.engine.drafters import TargetModel
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kernels.api import Batch
from retain.kernels.pool_dtypes import pool_dtype, slots_in_page
from retain.kv.memory.demoted_tables import DemotedBlockTables
from retain.kv.memory.device_tables import DeviceTables
from retain.options import Fraction, PositiveInt, check_bounds
from retain.plugins import check_choice
from retain.types import Ints


@dataclass
class Drafter:
    """Attend to `budget` slots of each head, selected every `refresh` rounds; masses fade by `decay` each round.

    `dtype`: int4, k8v4 or int8 to attend to a copy of all tokens instead. `weights`: bf16, int8, int4, or auto for the
    target's own.
    """

    k: str = "auto"
    budget: PositiveInt = 256
    weights: str = "auto"
    refresh: PositiveInt = 8
    decay: Fraction = 0.9
    dtype: str = "auto"
    _copy_dtype: torch.dtype | None = field(default=None, init=False)
    _target: TargetModel | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _num_rounds: dict[Request, int] = field(default_factory=dict, init=False)  # with too many pages to use all
    _top_pages: dict[Request, NDArray[np.int64]] = field(default_factory=dict, init=False)  # [M, G, m], table indices

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("self: dtype", self.dtype, "auto", "int4", "k8v4", "int8")

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in a round where k is auto."""
        return 8

    def attach(self, target: TargetModel) -> None:
        """Load the requantized target, if `weights` names one, and allocate the tables. Raises ValueError."""
        self._target = target
        cache = target.cache
        copies = None if self.dtype == "auto" else self._open_copies()
        self._runner = target.runner if self.weights == "auto" else target.load_requantized_runner(self.weights)
        N, L, G, n = cache.tables.pages.shape
        self._page_budget = min(max(self.budget // cache.page_size, 3) + 1, n)  # one more, for drafts that need a page
        self._pages: Ints = np.zeros((N, L, G, n), np.int32)
        self._counts: Ints = np.zeros((N, L, G), np.int32)
        self._device_tables = DeviceTables(self._pages, self._counts, cache.tables.window, cache.kv.device, copies)

    def _open_copies(self) -> DemotedBlockTables:
        """Return the tables of copies in `dtype`. Raises ValueError where the cache cannot have them."""
        assert self._target
        kv = self._target.cache.kv
        copies = self._target.cache.copies
        self._copy_dtype = pool_dtype(self.dtype)
        if slots_in_page(kv.page_size, kv.k_dim, kv.dtype, self._copy_dtype, v_dim=kv.v_dim) <= kv.page_size:
            raise ValueError(f"self: dtype={self.dtype} saves no memory: a page of this cache has as many slots")
        return copies.open_tables(self._copy_dtype)

    def remove_request(self, request: Request) -> None:
        """Drop the selection of a request."""
        self._num_rounds.pop(request, None)
        self._top_pages.pop(request, None)

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """Set the drafts of requests, of at most the given lengths."""
        assert self._target and self._runner
        runner = self._runner
        cache = self._target.cache
        for request in self._num_rounds:
            request.score_decay = None  # no masses for requests that are not drafted for in this round
        prepared = [(r, n) for r, n in draft_limits if self._prepare(r, n)]  # of all: one may need another's copy
        ready: list[tuple[Request, int]] = []
        written: list[Tensor] = []
        for request, limit in prepared:
            assert request.row is not None
            self._fill_tables(request, limit)
            until_eviction = cache.tokens_until_eviction(request.row, request.num_computed_tokens)
            ready.append((request, min(limit, until_eviction - 1)))

        def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
            batch = self._build_batch([ready[j][0] for j in active], latest, step)
            written.append(batch.slot_mapping)
            return runner.forward(batch)

        draft_autoregressive(ready, forward)
        if written:  # verification writes these slots again
            cache.reject(torch.cat(written, -1))

    def _prepare(self, request: Request, num_drafts: int) -> bool:
        """Own the pages of drafts, and extend the copy or ask for masses. Returns whether the request can have drafts.

        Without a copy, a request with a long text cannot the first time: the masses that select pages come first.
        """
        assert self._target and request.row is not None
        cache = self._target.cache
        num_computed = request.num_computed_tokens
        if self._copy_dtype:
            num_old = 0 if self._must_attend_in_full(request.row) else max(num_computed - cache.page_size, 0)
            is_copied = cache.copies.extend(request.row, self._copy_dtype, num_old)
            return is_copied and cache.reserve(request.row, num_computed + 1 + num_drafts)
        must_select = num_computed // cache.page_size >= self._page_budget
        request.score_decay = self.decay if must_select else None
        num_rounds = self._num_rounds[request] = self._num_rounds.get(request, -1) + must_select
        has_masses = num_rounds > 0 or not must_select
        return has_masses and cache.reserve(request.row, num_computed + 1 + num_drafts)

    def _fill_tables(self, request: Request, num_drafts: int) -> None:
        """Fill the drafter's tables of a request's row for this round."""
        assert self._target and request.row is not None
        tables = self._target.cache.tables
        row = request.row
        counts = self._counts[row] = tables.counts[row]
        self._device_tables.mark_dirty(row)
        self._pages[row, :, :, : counts.max()] = tables.pages[row, :, :, : counts.max()]
        if self._must_attend_in_full(row):
            return
        end = (request.num_computed_tokens + num_drafts) // tables.page_size + 1
        full_layers = tables.full_layers(row)
        if self._copy_dtype:
            first = int(self._target.cache.copies.num_tokens[row]) // tables.page_size
            selected = np.broadcast_to(np.arange(first, end), (len(full_layers), counts.shape[1], end - first))
        else:
            selected = self._select_pages(request, row, end)
        n = selected.shape[-1]
        self._pages[row, full_layers, :, :n] = np.take_along_axis(tables.pages[row, full_layers], selected, -1)
        self._counts[row, full_layers] = n

    def _must_attend_in_full(self, row: int) -> bool:
        assert self._target
        cache = self._target.cache
        is_sparse = row in cache.prefix_cache.sparse_rows
        return is_sparse or row in cache.evictors or not len(cache.tables.full_layers(row))

    def _select_pages(self, request: Request, row: int, end: int) -> NDArray[np.int64]:
        """Select pages of unwindowed layers before page `end` by mass; return table indices [M, G, m]."""
        assert self._target
        cache = self._target.cache
        S = self._target.cache.page_size
        full_layers = cache.tables.full_layers(row)
        newest = np.arange(max(request.num_computed_tokens - S, 0) // S, end)
        num_top = self._page_budget - len(newest)
        heads = len(full_layers), cache.tables.counts.shape[2]
        if newest[0] <= num_top or num_top < 1:
            return np.broadcast_to(np.arange(end), (*heads, end))
        if request not in self._top_pages or self._num_rounds[request] % self.refresh == 1:
            table = cache.kv.to_index(cache.tables.pages[row, full_layers, :, : newest[0]])  # [M, G, n]
            mass = cache.kv.mass.index_select(0, table.flatten()).sum((1, 2)).view(table.shape)
            mass[..., 0] = torch.inf
            self._top_pages[request] = mass.topk(num_top).indices.sort().values.cpu().numpy()
        return np.concatenate((self._top_pages[request], np.broadcast_to(newest, (*heads, len(newest)))), -1)

    def _build_batch(self, requests: Sequence[Request], tokens: Sequence[int], step: int) -> Batch:
        """Build the batch of one token of each request, `step` positions after its computed tokens."""
        assert self._target
        return pack_tokens(
            self._target.cache,
            rows=[r.row for r in requests],
            first_positions=[r.num_computed_tokens + step for r in requests],
            fresh=[[t] for t in tokens],
            num_logits=[1] * len(tokens),
            build_tables=self._device_tables.build_tables,
        )
