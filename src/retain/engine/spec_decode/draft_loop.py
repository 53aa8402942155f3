"""Draft tokens one after another with a model; the drafters `draft`, `self` and `assistant` share this loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retain.engine.request import Request
from retain.engine.sampler import apply_penalties, argmax_tokens, compute_probs, select_rows, tokens_to_host
from retain.engine.spec_decode.rejection_sampler import sample_inverse_cdf
from retain.kernels.transfers import to_device_like

# (indices [n] into the list of requests, their latest tokens [n], number of drafts before this one) -> logits [n, V]
DraftForward = Callable[[Sequence[int], Sequence[int], int], Tensor]


def draft_autoregressive(draft_limits: Sequence[tuple[Request, int]], forward: DraftForward) -> None:
    """Draft up to its limit of tokens for each request, sampled by the request's own params.

    A stop token ends them, and so does what is no distribution: a damaged drafter costs time, and no answer.
    """
    drafts: list[list[int]] = [[] for _ in draft_limits]
    draft_probs: list[list[Tensor]] = [[] for _ in draft_limits]
    active = [j for j, (_, limit) in enumerate(draft_limits) if limit > 0]
    while active:
        step = len(drafts[active[0]])
        requests = [draft_limits[j][0] for j in active]
        latest = [drafts[j][-1] if step else draft_limits[j][0].tokens[-1] for j in active]
        logits = apply_penalties(forward(active, latest, step), requests, [drafts[j] for j in active])  # [n, V]
        tokens = argmax_tokens(logits)  # [n]
        random_rows = [k for k, r in enumerate(requests) if not r.params.greedy]
        if random_rows:
            probs = compute_probs(select_rows(logits, random_rows), [requests[k].params for k in random_rows])
            sampled = sample_inverse_cdf(probs, [requests[k].next_uniform() for k in random_rows])
            sampled = sampled.masked_fill(probs.isnan().any(-1), -1)
            tokens = tokens.index_copy(0, to_device_like(tokens, random_rows), sampled)
        found = tokens_to_host(tokens)
        for k, row in zip(random_rows, probs if random_rows else (), strict=True):
            if found[k] >= 0:
                draft_probs[active[k]].append(row)
        drafted = [(j, token) for j, token in zip(active, found, strict=True) if token >= 0]
        for j, token in drafted:
            drafts[j].append(token)
        active = [j for j, _ in drafted if _goes_on(drafts[j], *draft_limits[j])]
    for (request, _), request_drafts, probs_list in zip(draft_limits, drafts, draft_probs, strict=True):
        request.set_drafts(request_drafts, torch.stack(probs_list) if probs_list else None)


def _goes_on(drafts: Sequence[int], request: Request, limit: int) -> bool:
    return len(drafts) < limit and drafts[-1] not in request.input.stop_ids
