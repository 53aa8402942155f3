"""Logits to tokens, as functions of tensors. What is not known here: requests' lives, slots, text.

`probabilities` is the distribution that a token is drawn from, after every option; greedy is its limit. A draw costs
one uniform number of the request's own generator, so an answer depends on its seed and not on its company.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from retain.engine.request import Logprob, Request, SamplingParams


def sample(logits: Tensor, requests: Sequence[Request]) -> list[tuple[int, Logprob | None]]:
    """The next token of each request, and its log-probabilities where asked for. logits float32 [N, V].

    Raises ValueError when a logit is not a number: the weights are damaged.
    """
    if not requests:
        return []
    raw = logits
    if any(r.params.penalised for r in requests):
        logits = logits.clone()
        for row, r in zip(logits, requests, strict=True):
            if r.params.penalised:
                penalise(row, r.tokens, r.answer, r.params)
    tokens = likeliest(logits)  # [N]
    drawn = [i for i, r in enumerate(requests) if not r.params.greedy]
    if drawn:
        p = probabilities(logits[drawn], [requests[i].params for i in drawn])  # [n, V]
        u = torch.cat([torch.rand(1, generator=requests[i].generator, dtype=torch.float64) for i in drawn])
        tokens[drawn] = draw(p, u)
    return [
        (token, logprob(raw[i], token, r.params.logprobs) if r.params.logprobs is not None else None)
        for i, (token, r) in enumerate(zip(tokens.tolist(), requests, strict=True))
    ]


def likeliest(logits: Tensor) -> Tensor:
    """The first of the largest of each row [N, V] -> int64 [N]. Raises ValueError when a row holds NaN.

    By numpy, which reads a row ten times as fast as torch, and finds NaN above everything.
    """
    x = logits.numpy(force=True)
    tokens = x.argmax(-1)
    if np.isnan(x[np.arange(len(x)), tokens]).any():
        raise ValueError("the model computes NaN: its weights are damaged, or too large for this dtype")
    return torch.from_numpy(tokens)


def penalise(logits: Tensor, tokens: Sequence[int], answer: Sequence[int], params: SamplingParams) -> None:
    """Lower, in place, the logits [V] of tokens that were there before."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)))
        x = logits[seen]
        logits[seen] = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    if answer and (params.presence_penalty or params.frequency_penalty):
        seen, times = torch.unique(torch.tensor(answer), return_counts=True)
        logits[seen] -= params.presence_penalty + params.frequency_penalty * times


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Distributions [n, V] after temperature, top-k, top-p and min-p, in this order; each row by its own parameters.

    logits float32 [n, V]; temperatures must be above 0.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[:, None]  # [n, 1]

    V = logits.shape[1]
    x = logits - logits.amax(-1, keepdim=True)  # before dividing: a tiny temperature must not overflow
    x = x / column([max(p.temperature, 1e-6) for p in params])
    if any(0 < p.top_k < V or p.top_p < 1 for p in params):
        x, order = x.sort(stable=True, dim=-1, descending=True)  # ties: the lower token first
        k = column([p.top_k if 0 < p.top_k < V else V for p in params])
        x = x.masked_fill(torch.arange(V) >= k, -torch.inf)
        p_sorted = x.softmax(-1)
        before = p_sorted.cumsum(-1) - p_sorted  # the mass of the likelier ones: the first is always kept
        top_p = column([p.top_p for p in params])
        x = x.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
        x = torch.empty_like(x).scatter_(-1, order, x)
    p = x.softmax(-1)
    if any(q.min_p for q in params):
        p = p.masked_fill(p < column([q.min_p for q in params]) * p.amax(-1, keepdim=True), 0)
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(p: Tensor, u: Tensor) -> Tensor:
    """One token for each row of p [n, V], by inverting its distribution at u in [0, 1), float64 [n] -> int64 [n]."""
    c = p.double().cumsum(-1)
    tokens = torch.searchsorted(c, (u * c[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[1] - 1 - p.flip(-1).ne(0).int().argmax(-1)  # rounding must not draw an impossible token
    return torch.minimum(tokens, last)


def logprob(logits: Tensor, token: int, n: int) -> Logprob:
    """What the model itself thought: logits [V] before any option."""
    x = logits.log_softmax(-1)
    top = x.topk(n)
    return Logprob(token, float(x[token]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
