"""assistant: draft with a head that was trained for the target, and attends to the target's own cache.

It computes the newest token with the hidden state that gave it, then each draft with the state of the one before. It
writes nothing: budgets, windows, quantized slots and prefixes are the target's (models/heads/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from retain.engine.batch_builder import pack_tokens
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import TargetModel
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kernels.api import Tables
from retain.kv.manager import KVCacheManager


@dataclass
class Drafter:
    """`model`: the folder of the assistant, or its .gguf file; `weights`: bf16, int8, int4, or auto as in its file."""

    needs_hidden_states = True
    k: str = "auto"
    model: str | None = None
    weights: str = "auto"
    _runner: Runner | None = field(default=None, init=False)
    _cache: KVCacheManager | None = field(default=None, init=False)

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in a round where k is auto."""
        return 8

    def attach(self, target: TargetModel) -> None:
        """Load the assistant. Raises ValueError where it was trained for another model."""
        if self.model is None:
            raise ValueError("assistant: say which model= drafts: a folder or a .gguf file")
        try:
            self._runner = target.load_draft_head(self.model, self.weights)
        except ValueError as error:
            raise ValueError(f"assistant: model={self.model}: {error}") from None
        self._cache = target.cache

    def remove_request(self, request: Request) -> None:
        """Do nothing: a request has its hidden state itself."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of requests whose newest token has been sampled with a hidden state."""
        assert self._runner and self._cache
        runner = self._runner
        cache = self._cache
        ready: list[tuple[Request, int]] = []
        states: list[Tensor] = []
        for request, limit in draft_limits:
            if request.hidden_state is not None and rows[request].reserve(request.num_computed_tokens + 1):
                ready.append((request, limit))
                states.append(request.hidden_state)

        def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
            requests = [ready[j][0] for j in active]
            batch = pack_tokens(
                cache,
                rows=[rows[r].index for r in requests],
                first_positions=[r.num_computed_tokens for r in requests],  # of every draft, as in training
                fresh=[[t] for t in latest],
                num_logits=[1] * len(requests),
                build_tables=self._build_tables,
            )
            logits = runner.forward(replace(batch, hidden_states=torch.stack([states[j] for j in active])))
            found = runner.hidden_states
            assert found is not None
            for j, state in zip(active, found.clone(), strict=True):
                states[j] = state
            return logits

        draft_autoregressive(ready, forward)

    def _build_tables(self, rows: Tensor, query_start_loc: Tensor) -> list[Tables]:
        """Return the tables of rows, where the slot of a query's own position is a hole."""
        assert self._cache
        return [replace(tables, dense=None) for tables in self._cache.build_tables(rows, query_start_loc)]
