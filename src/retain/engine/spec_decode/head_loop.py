"""Draft with a head: each pass computes one token of each request, with the hidden state of the token before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from retain.engine.batch_builder import pack_tokens
from retain.engine.cache_interface import RequestRow
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kernels.api import Batch, Tables
from retain.kv.manager import KVCacheManager


def draft_with_head(
    runner: Runner,
    cache: KVCacheManager,
    draft_limits: Sequence[tuple[Request, int]],
    rows: Mapping[Request, RequestRow],
    find_position: Callable[[Request, int], int],
    build_tables: Callable[[Tensor, Tensor], list[Tables]] | None = None,
) -> list[Batch]:
    """Draft for requests that have a hidden state, up to the limit of each. Returns the batches of all passes.

    The token behind so many drafts has the position `find_position(request, number)`. The rows own its slots.
    """
    requests = [request for request, _ in draft_limits]
    states = [request.hidden_state for request in requests]
    batches: list[Batch] = []

    def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
        batch = pack_tokens(
            cache,
            rows=[rows[requests[j]].index for j in active],
            first_positions=[find_position(requests[j], step) for j in active],
            fresh=[[t] for t in latest],
            num_logits=[1] * len(active),
            build_tables=build_tables,
        )
        before = torch.stack([state for j in active if (state := states[j]) is not None])
        batches.append(replace(batch, hidden_states=before))
        logits = runner.forward(batches[-1])
        found = runner.hidden_states
        assert found is not None
        for j, state in zip(active, found.clone(), strict=True):
            states[j] = state
        return logits

    draft_autoregressive(draft_limits, forward)
    return batches
