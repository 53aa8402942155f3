"""mtp: draft with the MTP layer of the target's own file (models/mtp.py).

The target's program caches each token in that layer, too, so that prefixes, tiers and forks have it. A pass computes
the newest token with the hidden state before it, then each draft with the state of the one before. What it writes is
written again by verification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.head_loop import draft_with_head
from retain.kv.manager import KVCacheManager


@dataclass
class Drafter:
    """Has no options but `k`: the layer is loaded with the model, with its weights."""

    needs: ClassVar[DrafterNeeds] = DrafterNeeds(hidden_states=True, head="")
    max_draft_tokens: ClassVar[int] = 8
    k: str = "auto"
    _runner: Runner | None = field(default=None, init=False)
    _cache: KVCacheManager | None = field(default=None, init=False)

    def attach(self, target: TargetModel) -> None:
        """Take the head that was loaded with the target. Raises ValueError where there is none."""
        if target.cached_head is None:
            name = type(self).__module__.rpartition(".")[2]
            raise ValueError(f"{name}: name it when the engine starts, for a model that generates")
        self._runner = target.cached_head
        self._cache = target.cache

    def remove_request(self, request: Request) -> None:
        """Do nothing: a request has its hidden state itself."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of requests whose newest token has been sampled with a hidden state."""
        assert self._runner and self._cache
        ready: list[tuple[Request, int]] = []
        for request, limit in draft_limits:
            num_computed = request.num_computed_tokens
            limit = min(limit, rows[request].next_stop(num_computed) - num_computed - 1)
            if request.hidden_state is not None and rows[request].reserve(num_computed + 1 + limit):
                ready.append((request, limit))

        def find_position(request: Request, step: int) -> int:
            return request.num_computed_tokens + step

        batches = draft_with_head(self._runner, self._cache, ready, rows, find_position)
        if batches:  # verification writes these slots again, unless the drafts find no room in the step
            token_rows = torch.cat([batch.token_rows for batch in batches])
            self._cache.reject(token_rows.numpy(), torch.cat([batch.positions for batch in batches]).numpy())
