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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from retain.engine.batch_builder import pack_tokens
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kernels.api import Batch
from retain.kernels.slots.pool_dtypes import pool_dtype
from retain.kv.draft_tables import DraftTables, PageIndices
from retain.options import Fraction, PositiveInt, check_bounds
from retain.plugins import check_choice


@dataclass
class Drafter:
    """Attend to `budget` slots of each head, selected every `refresh` rounds; masses fade by `decay` each round.

    `dtype`: int4, k8v4 or int8 to attend to a copy of all tokens instead. `weights`: bf16, int8, int4, or auto for the
    target's own.
    """

    needs: ClassVar[DrafterNeeds] = DrafterNeeds()
    max_draft_tokens: ClassVar[int] = 8
    k: str = "auto"
    budget: PositiveInt = 256
    weights: str = "auto"
    refresh: PositiveInt = 8
    decay: Fraction = 0.9
    dtype: str = "auto"
    _target: TargetModel | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _num_rounds: dict[Request, int] = field(default_factory=dict, init=False)  # with too many pages to use all
    _top_pages: dict[Request, PageIndices | None] = field(default_factory=dict, init=False)
    _tables: DraftTables | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("self: dtype", self.dtype, "auto", "int4", "k8v4", "int8")

    def attach(self, target: TargetModel) -> None:
        """Load the requantized target, if `weights` names one, and allocate the tables. Raises ValueError."""
        self.attach_for(f"self: dtype={self.dtype}", target)

    def attach_for(self, option: str, target: TargetModel) -> None:
        """Attach the drafter for an option, perhaps of another drafter: a ValueError names it."""
        self._target = target
        cache = target.cache
        dtype = None if self.dtype == "auto" else pool_dtype(self.dtype)
        try:
            self._tables = cache.open_draft_tables(dtype)
        except ValueError as error:
            raise ValueError(f"{option} {error}") from None
        self._runner = target.runner if self.weights == "auto" else target.load_requantized_runner(self.weights)
        most = self._tables.max_pages
        self._page_budget = min(max(self.budget // cache.page_size, 3) + 1, most)  # one more, for drafts that need it

    def remove_request(self, request: Request) -> None:
        """Drop the selection of a request."""
        self._num_rounds.pop(request, None)
        self._top_pages.pop(request, None)

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of requests, of at most the given lengths."""
        assert self._target and self._runner
        runner = self._runner
        cache = self._target.cache
        for request in self._num_rounds:
            request.score_decay = None  # no masses for requests that are not drafted for in this round
        prepared = [
            (r, n) for r, n in draft_limits if self._prepare(r, rows[r], n)
        ]  # of all: one may need another's copy
        ready: list[tuple[Request, int]] = []
        written: list[Batch] = []  # of each pass
        for request, limit in prepared:
            self._fill_tables(request, rows[request], limit)
            num_computed = request.num_computed_tokens
            ready.append((request, min(limit, rows[request].next_stop(num_computed) - num_computed - 1)))

        def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
            batch = self._build_batch([(ready[j][0], rows[ready[j][0]]) for j in active], latest, step)
            written.append(batch)
            return runner.forward(batch)

        draft_autoregressive(ready, forward)
        if written:  # verification writes these slots again
            token_rows = torch.cat([batch.token_rows for batch in written])
            cache.reject(token_rows.numpy(), torch.cat([batch.positions for batch in written]).numpy())

    def _prepare(self, request: Request, row: RequestRow, num_drafts: int) -> bool:
        """Own the pages of drafts, and extend the copy or ask for masses. Returns whether the request can have drafts.

        Without a copy, a request with a long text cannot the first time: the masses that select pages come first.
        """
        assert self._target and self._tables
        num_computed = request.num_computed_tokens
        end = num_computed + 1 + num_drafts
        if self._tables.dtype:
            return self._tables.extend_copy(row.index, num_computed) and row.reserve(end)
        must_select = num_computed // self._target.cache.page_size >= self._page_budget
        request.score_decay = self.decay if must_select else None
        num_rounds = self._num_rounds[request] = self._num_rounds.get(request, -1) + must_select
        return (num_rounds > 0 or not must_select) and row.reserve(end)

    def _fill_tables(self, request: Request, row: RequestRow, num_drafts: int) -> None:
        """Fill the drafter's tables of a request's row for this round."""
        assert self._target and self._tables
        index = row.index
        S = self._target.cache.page_size
        num_computed = request.num_computed_tokens
        end_page = (num_computed + num_drafts) // S + 1
        first_new = max(num_computed - S, 0) // S
        num_top = self._page_budget - (end_page - first_new)
        if self._tables.dtype or first_new <= num_top or num_top < 1:
            self._tables.fill(index, 0, end_page)
            return
        if self._top_pages.get(request) is None or (self._num_rounds[request] - 1) % self.refresh == 0:
            self._top_pages[request] = self._tables.rank_pages(index, first_new, num_top)
        self._tables.fill(index, first_new, end_page, self._top_pages[request])

    def _build_batch(self, drafting: Sequence[tuple[Request, RequestRow]], tokens: Sequence[int], step: int) -> Batch:
        """Build the batch of one token of each request, `step` positions after its computed tokens."""
        assert self._target and self._tables
        return pack_tokens(
            self._target.cache,
            rows=[row.index for _, row in drafting],
            first_positions=[r.num_computed_tokens + step for r, _ in drafting],
            fresh=[[t] for t in tokens],
            num_logits=[1] * len(tokens),
            build_tables=self._tables.build_tables,
        )
