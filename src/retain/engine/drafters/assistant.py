"""assistant: draft with a head that was trained for the target, and attends to the target's own cache.

It computes the newest token with the hidden state that gave it, then each draft with the state of the one before. It
writes nothing: budgets, windows, quantized slots and prefixes are the target's (models/heads/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel, mtp
from retain.engine.request import Request
from retain.engine.spec_decode.head_loop import draft_with_head
from retain.kernels.api import Tables


@dataclass
class Drafter(mtp.Drafter):
    """`model`: the folder of the assistant, or its .gguf file; `weights`: bf16, int8, int4, or auto as in its file."""

    needs: ClassVar[DrafterNeeds] = DrafterNeeds(hidden_states=True)
    model: str | None = None
    weights: str = "auto"

    def attach(self, target: TargetModel) -> None:
        """Load the assistant. Raises ValueError where it was trained for another model."""
        if self.model is None:
            raise ValueError("assistant: say which model= drafts: a folder or a .gguf file")
        try:
            self._runner = target.load_draft_head(self.model, self.weights)
        except ValueError as error:
            raise ValueError(f"assistant: model={self.model}: {error}") from None
        self._cache = target.cache

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of requests whose newest token has been sampled with a hidden state."""
        assert self._runner and self._cache
        ready = [
            (request, limit)
            for request, limit in draft_limits
            if request.hidden_state is not None and rows[request].reserve(request.num_computed_tokens + 1)
        ]

        def find_position(request: Request, step: int) -> int:
            return request.num_computed_tokens  # of every draft, as in training

        draft_with_head(self._runner, self._cache, ready, rows, find_position, self._build_tables)

    def _build_tables(self, rows: Tensor, query_start_loc: Tensor) -> list[Tables]:
        """Return the tables of rows, where the slot of a query's own position is a hole."""
        assert self._cache
        return [replace(tables, dense=None) for tables in self._cache.build_tables(rows, query_start_loc)]
