"""Logits to tokens, as functions of tensors. What is not known here: requests' lives, slots, text.

`probabilities` is the distribution that a token is drawn from, after every option; greedy is its limit. A draw costs
one uniform number of the request's own generator, so an answer depends on its seed and not on its company. A request
with K drafts has K + 1 rows, and gets from one to K + 1 tokens (speculate.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from retain.engine.request import Logprob, Request, SampledTokens
from retain.engine.spec_decode.rejection_sampler import (
    rejection_sample,
    sample_inverse_cdf,
    to_device_like,
    verify_deterministic,
    verify_greedy,
)
from retain.sampling_params import SamplingParams


def sample(logits: Tensor, requests: Sequence[Request]) -> list[SampledTokens]:
    """The next tokens of each request, and their log-probabilities where asked for.

    logits float32 [N, V], a row for the token after each draft and one more, request by request. Raises ValueError when
    a logit is not a number: the weights are damaged.
    """
    if not requests:
        return []
    raw, whose = logits, [r for r in requests for _ in range(len(r.drafts) + 1)]  # [N]
    starts = [0, *accumulate(len(r.drafts) + 1 for r in requests)]
    logits = apply_penalties(logits, whose, [r.drafts[:i] for r in requests for i in range(len(r.drafts) + 1)])
    logits = apply_grammars(logits, raw, requests, starts)
    tokens = argmax_tokens(logits)  # [N]
    drawn = [i for i, r in enumerate(whose) if not r.params.greedy]
    q = compute_probs(select_rows(logits, drawn), [whose[i].params for i in drawn]) if drawn else logits[:0]  # [n, V]
    alone = [k for k, i in enumerate(drawn) if not whose[i].drafts]
    if alone:
        u = [whose[drawn[k]].next_uniform() for k in alone]
        tokens = tokens.index_copy(
            0, to_device_like(tokens, [drawn[k] for k in alone]), sample_inverse_cdf(select_rows(q, alone), u)
        )
    at, best, found = {i: k for k, i in enumerate(drawn)}, tokens_to_host(tokens), []
    for start, end, r in zip(starts, starts[1:], requests, strict=False):
        if r.drafts and not r.params.greedy:
            wanted = q[at[start] : at[start] + end - start]
            if r.draft_probs is None:
                chosen = verify_deterministic(wanted, r.drafts, r.peek_uniforms(len(r.drafts) + 1))
                r.peek_uniforms(len(chosen), consume=True)
            else:
                chosen = rejection_sample(wanted, r.draft_probs, r.drafts, r.next_uniform)
        else:
            chosen = verify_greedy(best[start:end], r.drafts)
        n = r.params.logprobs
        known = [None] * len(chosen) if n is None else compute_logprobs(raw[start : start + len(chosen)], chosen, n)
        found.append(list(zip(chosen, known, strict=True)))
    return found


def argmax_tokens(logits: Tensor) -> Tensor:
    """The first of the largest of each row [N, V] -> int64 [N]; -1 where a row holds NaN, which is above everything.

    On a CPU by numpy, which reads a row ten times as fast as torch.
    """
    if logits.device.type != "cpu":
        best, tokens = logits.max(-1)
        return tokens.masked_fill(best.isnan(), -1)
    x = logits.numpy(force=True)
    found = x.argmax(-1)
    return torch.from_numpy(np.where(np.isnan(x[np.arange(len(x)), found]), -1, found))


def tokens_to_host(tokens: Tensor) -> list[int]:
    """Tokens [N], brought to the host. Raises ValueError where there was NaN: the weights are damaged."""
    found: list[int] = tokens.tolist()
    if -1 in found:
        raise ValueError("the model computes NaN: its weights are damaged, or too large for this dtype")
    return found


def select_rows(x: Tensor, indices: list[int]) -> Tensor:
    """These rows; where they are all, the same memory."""
    return x if indices == list(range(len(x))) else x.index_select(0, to_device_like(x, indices))


def apply_penalties(logits: Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [N, V] lowered for what was there before: each row's request, and drafts behind it. Copied if need be."""
    if not any(r.params.has_penalties_or_bias for r in requests):
        return logits
    logits = logits.clone()
    for row, r, more in zip(logits, requests, drafts, strict=True):
        if r.params.has_penalties_or_bias:
            penalize_row(row, [*r.tokens, *more], [*r.output_tokens, *more], r.params)
    return logits


def apply_grammars(logits: Tensor, raw: Tensor, requests: Sequence[Request], starts: Sequence[int]) -> Tensor:
    """Logits [N, V] of what requests' forms allow, request i from row starts[i] on. Copied if they are still `raw`."""
    if not any(r.grammar for r in requests):
        return logits
    logits = logits.clone() if logits is raw else logits
    for start, end, r in zip(starts, starts[1:], requests, strict=False):
        if r.grammar:
            r.grammar.mask_logits(logits[start:end], r.drafts)
    return logits


def penalize_row(logits: Tensor, tokens: Sequence[int], output_tokens: Sequence[int], params: SamplingParams) -> None:
    """Lower, in place, the logits [V] of tokens that were there before."""
    if params.repetition_penalty != 1.0:
        seen = to_device_like(logits, sorted(set(tokens)))
        x = logits[seen]
        logits[seen] = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    if output_tokens and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output_tokens)
        seen, times = to_device_like(logits, list(counts)), to_device_like(logits, list(counts.values()))
        logits[seen] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        which, bias = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, to_device_like(logits, which), to_device_like(logits, bias, torch.float32))


def compute_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Distributions [n, V] after temperature, top-k, top-p and min-p, in this order; each row by its own parameters.

    logits float32 [n, V]; temperatures must be above 0.
    """

    def column(values: Sequence[float]) -> Tensor:
        return to_device_like(logits, values, torch.float32)[:, None]  # [n, 1]

    V = logits.shape[1]
    x = logits - logits.amax(-1, keepdim=True)  # before dividing: a tiny temperature must not overflow
    x = x / column([max(p.temperature, 1e-6) for p in params])
    if any(0 < p.top_k < V or p.top_p < 1 for p in params):
        x, order = x.sort(stable=True, dim=-1, descending=True)  # ties: the lower token first
        k = column([p.top_k if 0 < p.top_k < V else V for p in params])
        x = x.masked_fill(torch.arange(V, device=x.device) >= k, -torch.inf)
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


def compute_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """What the model itself thought of tokens, and the n likeliest: logits [T, V] before any option."""
    x = logits.log_softmax(-1)
    chosen, (best, which) = x.gather(1, to_device_like(x, tokens)[:, None])[:, 0].tolist(), x.topk(num_top)
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(which.tolist(), best.tolist(), strict=True)]
    return [Logprob(*x) for x in zip(tokens, chosen, tops, strict=True)]
