"""A model guesses, token by token: what the drafters `draft` and `self` have in common.

What is not known here: which model it is, and what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retain.engine.request import Request
from retain.engine.sampler import apply_penalties, argmax_tokens, compute_probs, select_rows, tokens_to_host
from retain.engine.spec_decode.rejection_sampler import sample_inverse_cdf, to_device_like

# Logits [n, V] behind these tokens of those that are asked, by number: the i-th that each of them guesses.
DraftForward = Callable[[Sequence[int], Sequence[int], int], Tensor]


def draft_autoregressive(draft_limits: Sequence[tuple[Request, int]], forward: DraftForward) -> None:
    """Draft so many tokens for each request, drawn as it would draw them itself; none behind a stop token."""
    drafts: list[list[int]] = [[] for _ in draft_limits]
    told: list[list[Tensor]] = [[] for _ in draft_limits]
    going = [j for j, (_, n) in enumerate(draft_limits) if n > 0]
    while going:
        i = len(drafts[going[0]])
        requests = [draft_limits[j][0] for j in going]
        logits = forward(going, [drafts[j][-1] if i else draft_limits[j][0].tokens[-1] for j in going], i)
        logits = apply_penalties(logits, requests, [drafts[j] for j in going])  # [n, V]
        tokens = argmax_tokens(logits)  # [n]
        drawn = [k for k, r in enumerate(requests) if not r.params.greedy]
        if drawn:
            p = compute_probs(select_rows(logits, drawn), [requests[k].params for k in drawn])  # [n, V]
            tokens = tokens.index_copy(
                0, to_device_like(tokens, drawn), sample_inverse_cdf(p, [requests[k].next_uniform() for k in drawn])
            )
            for k, row in zip(drawn, p, strict=True):
                told[going[k]].append(row)
        for j, token in zip(going, tokens_to_host(tokens), strict=True):
            drafts[j].append(token)
        going = [
            j
            for j in going
            if len(drafts[j]) < draft_limits[j][1] and drafts[j][-1] not in draft_limits[j][0].input.stop_ids
        ]
    for (request, _), tokens_, p_ in zip(draft_limits, drafts, told, strict=True):
        request.set_drafts(tokens_, torch.stack(p_) if p_ else None)
