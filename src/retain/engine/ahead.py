"""A model guesses, token by token: what the drafters `draft` and `self` have in common.

What is not known here: which model it is, and what it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from retain.engine.request import Request
from retain.engine.sampler import likeliest, penalised, pick, probabilities, said
from retain.engine.speculate import beside, draw

# Logits [n, V] behind these tokens of those that are asked, by number: the i-th that each of them guesses.
Forward = Callable[[Sequence[int], Sequence[int], int], Tensor]


def guess(asked: Sequence[tuple[Request, int]], forward: Forward) -> None:
    """Draft so many tokens for each request, drawn as it would draw them itself; none behind a stop token."""
    drafts: list[list[int]] = [[] for _ in asked]
    told: list[list[Tensor]] = [[] for _ in asked]
    going = [j for j, (_, n) in enumerate(asked) if n > 0]
    while going:
        i = len(drafts[going[0]])
        requests = [asked[j][0] for j in going]
        logits = forward(going, [drafts[j][-1] if i else asked[j][0].tokens[-1] for j in going], i)
        logits = penalised(logits, requests, [drafts[j] for j in going])  # [n, V]
        tokens = likeliest(logits)  # [n]
        drawn = [k for k, r in enumerate(requests) if not r.params.greedy]
        if drawn:
            p = probabilities(pick(logits, drawn), [requests[k].params for k in drawn])  # [n, V]
            tokens = tokens.index_copy(0, beside(tokens, drawn), draw(p, [requests[k].uniform() for k in drawn]))
            for k, row in zip(drawn, p, strict=True):
                told[going[k]].append(row)
        for j, token in zip(going, said(tokens), strict=True):
            drafts[j].append(token)
        going = [j for j in going if len(drafts[j]) < asked[j][1] and drafts[j][-1] not in asked[j][0].stop_ids]
    for (request, _), tokens_, p_ in zip(asked, drafts, told, strict=True):
        request.draft(tokens_, torch.stack(p_) if p_ else None)
