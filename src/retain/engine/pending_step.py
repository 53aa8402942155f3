"""A step between its two halves: launched, and its tokens not yet read. The next step may compute them all the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from retain.engine.request import Request
from retain.engine.sampler import Samples
from retain.engine.scheduler import ScheduledRequest
from retain.kernels.api import Batch
from retain.kernels.pending_tokens import PendingTokens


@dataclass(frozen=True)
class PendingStep:
    """A step whose work the device has or will get, in this order, without the host's help."""

    scheduled: Sequence[ScheduledRequest]
    batch: Batch
    samples: Samples
    logits: dict[Request, Tensor]  # of requests that need them; good until the next launch
    started: float  # seconds, of perf_counter
    draft_s: float  # that drafting took before


def insert_pending_tokens(
    batch: Batch, scheduled: Sequence[ScheduledRequest], pending_steps: Collection[PendingStep]
) -> Batch:
    """Return the batch of a step with the pending tokens that it computes.

    `pending_steps` are in the order of their launches.
    """
    if not pending_steps:
        return batch
    starts = batch.query_start_loc.tolist()
    fresh: dict[Request, range] = {}  # the fresh tokens of requests with pending ones
    next_index: dict[Request, int] = {}  # of the fresh token that the next pending one is
    for s, start, end in zip(scheduled, starts, starts[1:], strict=False):
        if s.request.num_pending_tokens and not s.request.scoring:
            fresh[s.request] = range(start, end)
            next_index[s.request] = start + len(s.request.tokens) - s.request.num_computed_tokens
    sources = [-1] * len(batch.input_ids)
    sampled: list[Tensor] = []  # of the steps that have some of these tokens
    num_sampled = 0
    for step in pending_steps if next_index else ():
        is_used = False
        for request, row in zip(step.samples.requests, step.samples.starts, strict=False):
            index = next_index.get(request)
            if index is None:
                continue
            next_index[request] = index + 1
            if index in fresh[request]:  # an older pending token is computed already
                sources[index] = num_sampled + row
                is_used = True
        if is_used:
            sampled.append(step.samples.tokens)
            num_sampled += len(step.samples.tokens)
    if not sampled:
        return batch
    tokens = sampled[0] if len(sampled) == 1 else torch.cat(sampled)
    return replace(batch, pending_tokens=PendingTokens(tokens, torch.tensor(sources, dtype=torch.int32)))
