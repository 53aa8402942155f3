"""The sampler: logits to tokens.

`compute_probs` is the distribution that a token is sampled from, after all options; greedy is its limit. A sample takes
one uniform number from the request's own generator, so an answer depends on its seed and not on other requests. A
request with K drafts has K + 1 rows of logits and gets from one to K + 1 tokens (see spec_decode.rejection_sampler).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from retain.engine.penalties import LogitPenalties
from retain.engine.request import Logprob, Request, SampledTokens
from retain.engine.spec_decode.rejection_sampler import (
    rejection_sample,
    sample_inverse_cdf,
    verify_deterministic,
    verify_greedy,
)
from retain.kernels.transfers import HostCopy, to_device, to_device_like, upload
from retain.sampling_params import SamplingParams


@dataclass(frozen=True)
class Samples:
    """Sampled tokens on the device; `read` waits for them.

    The rows `starts[i] : starts[i + 1]` are those of request i: one before each of its drafts, and one after the last.
    """

    requests: list[Request]
    starts: list[int]
    tokens: Tensor  # int64 [N]
    host_tokens: HostCopy  # the same
    drafts: dict[Request, tuple[list[int], Tensor | None]]  # of requests that have some, with their distributions
    probs: dict[Request, Tensor]  # [K + 1, V]: the target's distributions where drafts are verified at random
    logprobs: dict[Request, Tensor]  # [K + 1, V] of requests that want some
    hidden_states: Tensor | None = None  # [N, E], where a drafter reads them

    def find_state(self, request: Request, num_tokens: int) -> Tensor | None:
        """Return the hidden state [E] that gave the last of so many tokens of a request, where a drafter reads it."""
        if self.hidden_states is None:
            return None
        return self.hidden_states[self.starts[self.requests.index(request)] + num_tokens - 1].clone()

    def read(self) -> list[SampledTokens]:
        """Return the tokens of each request, with log-probabilities for those that want them.

        Raises ValueError for NaN logits.
        """
        row_tokens = tokens_to_host(self.host_tokens) if self.requests else []
        if -1 in row_tokens:
            raise ValueError("the model computes NaN: its weights are damaged, or too large for this dtype")
        if not self.drafts and not self.logprobs:
            return [[(token, None)] for token in row_tokens]
        found: list[SampledTokens] = []
        for start, end, request in zip(self.starts, self.starts[1:], self.requests, strict=False):
            drafts, draft_probs = self.drafts.get(request, ([], None))
            if request in self.probs:
                chosen = verify_drafts(self.probs[request], drafts, draft_probs, request)
            else:
                chosen = verify_greedy(row_tokens[start:end], drafts)
            logprobs: Sequence[Logprob | None] = [None] * len(chosen)
            if (num_top := request.params.logprobs) is not None:
                logprobs = select_logprobs(self.logprobs[request][: len(chosen)], chosen, num_top)
            found.append(list(zip(chosen, logprobs, strict=True)))
        return found


def sample(logits: Tensor, requests: Sequence[Request], hidden_states: Tensor | None = None) -> Samples:
    """Sample the next tokens of each request; nothing waits for the device.

    Logits are float32 [N, V]: for a request with K drafts the rows before each draft and after the last one, request by
    request. So are `hidden_states` [N, E], which are a copy.
    """
    starts = [0, *accumulate(len(r.drafts) + 1 for r in requests)]
    if not requests:
        none = torch.zeros(0, dtype=torch.int64)
        return Samples([], starts, none, HostCopy(none), {}, {}, {})
    row_requests = [r for r in requests for _ in range(len(r.drafts) + 1)]  # [N]
    row_drafts = [r.drafts[:i] for r in requests for i in range(len(r.drafts) + 1)]  # [N]: those before the row
    adjusted = apply_penalties(logits, row_requests, row_drafts)
    adjusted = apply_grammars(adjusted, logits, requests, starts)
    adjusted = mask_stop_tokens(adjusted, logits, row_requests, row_drafts)
    tokens = argmax_tokens(adjusted)  # [N]
    random_rows = [i for i, r in enumerate(row_requests) if not r.params.greedy]
    probs = adjusted[:0]  # [n, V], of the random rows
    undrafted = [k for k, i in enumerate(random_rows) if not row_requests[i].drafts]
    if random_rows:
        rows = [random_rows[k] for k in undrafted]
        params = [row_requests[i].params for i in random_rows]
        uniforms = torch.tensor([row_requests[i].next_uniform() for i in rows], dtype=torch.float64)
        numbers = sampling_columns(params, logits.shape[1]), uniforms, torch.tensor(rows, dtype=torch.int64)
        columns, uniforms, index = upload(numbers, tokens.device)
        probs = compute_probs(select_rows(adjusted, random_rows), params, columns)
    if undrafted:
        sampled = sample_inverse_cdf(select_rows(probs, undrafted), uniforms)
        tokens = tokens.index_copy(0, index, sampled.where(tokens.index_select(0, index) >= 0, -1))
    first_probs = {i: k for k, i in enumerate(random_rows)}
    ranges = list(zip(requests, starts, starts[1:], strict=False))
    verified = [(r, first_probs[b], e - b) for r, b, e in ranges if r.drafts and not r.params.greedy]
    return Samples(
        requests=list(requests),
        starts=starts,
        tokens=tokens,
        host_tokens=HostCopy(tokens),
        drafts={r: (r.drafts, r.draft_probs) for r in requests if r.drafts},
        probs={r: probs[first : first + n] for r, first, n in verified},
        logprobs={r: logits[b:e].log_softmax(-1) for r, b, e in ranges if r.params.logprobs is not None},
        hidden_states=hidden_states,
    )


def verify_drafts(probs: Tensor, drafts: Sequence[int], draft_probs: Tensor | None, request: Request) -> list[int]:
    """Verify a request's drafts by the target's distributions [K + 1, V]. Returns the accepted ones and one more."""
    if draft_probs is not None:
        return rejection_sample(probs, draft_probs, drafts, request.next_uniform)
    chosen = verify_deterministic(probs, drafts, request.peek_uniforms(len(drafts) + 1))
    request.peek_uniforms(len(chosen), consume=True)
    return chosen


def argmax_tokens(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row [N, V], int64 [N]; -1 for a row with NaN.

    On a CPU numpy finds them, ten times as fast as torch.
    """
    if logits.device.type != "cpu":
        best, tokens = logits.max(-1)  # NaN counts as the largest, as in numpy
        return tokens.masked_fill(best.isnan(), -1)
    x = logits.numpy(force=True)
    found = x.argmax(-1)
    return torch.from_numpy(np.where(np.isnan(x[np.arange(len(x)), found]), -1, found))


def tokens_to_host(tokens: Tensor | HostCopy) -> list[int]:
    """Copy the tokens of `argmax_tokens` [N] to the host; -1 is that of NaN logits."""
    found: list[int] = (tokens.wait() if isinstance(tokens, HostCopy) else tokens).tolist()
    return found


def select_rows(x: Tensor, indices: list[int]) -> Tensor:
    """Return rows of a tensor; the tensor itself if all of its rows are selected."""
    return x if indices == list(range(len(x))) else x.index_select(0, to_device_like(x, indices))


def apply_penalties(logits: Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> Tensor:
    """Penalize each row of logits [N, V] by the tokens of its request and the drafts before it; copies if needed."""
    if not any(r.params.has_penalties_or_bias for r in requests):
        return logits
    logits = logits.clone()
    for row, request, before in zip(logits, requests, drafts, strict=True):
        if request.params.has_penalties_or_bias:
            request.penalties = request.penalties or LogitPenalties(request.params, row)
            request.penalties.update(request.tokens, len(request.prompt))
            request.penalties.apply(row, before)
    return logits


def apply_grammars(logits: Tensor, raw: Tensor, requests: Sequence[Request], starts: Sequence[int]) -> Tensor:
    """Mask the tokens that the requests' grammars forbid in logits [N, V]. `raw` is not changed.

    The rows of request i begin at starts[i].
    """
    if not any(r.grammar for r in requests):
        return logits
    logits = logits.clone() if logits is raw else logits
    for start, end, request in zip(starts, starts[1:], requests, strict=False):
        if request.grammar:
            request.grammar.mask_logits(logits[start:end], request.drafts)
    return logits


def mask_stop_tokens(
    logits: Tensor, raw: Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
) -> Tensor:
    """Mask the tokens that would end an answer before its `min_tokens`, in each row of logits [N, V].

    A row where nothing else is left stays: its grammar ends the answer. `raw` is not changed.
    """
    rows = [
        i
        for i, (request, before) in enumerate(zip(requests, drafts, strict=True))
        if request.params.min_tokens
        and request.input.stop_ids
        and request.num_output_tokens + request.num_pending_tokens + len(before) < request.params.min_tokens
    ]
    if not rows:
        return logits
    logits = logits.clone() if logits is raw else logits
    for i in rows:
        masked = logits[i].index_fill(0, to_device_like(logits, sorted(requests[i].input.stop_ids)), -torch.inf)
        logits[i] = torch.where(masked.isneginf().all(), logits[i], masked)
    return logits


def sampling_columns(params: Sequence[SamplingParams], V: int) -> Tensor:
    """Return temperature, top-k, top-p and min-p of rows of V logits, float32 [n, 4] on the host."""
    # A temperature is neither 0 nor infinite in float32.
    rows = [(min(max(p.temperature, 1e-6), 1e30), p.top_k if 0 < p.top_k < V else V, p.top_p, p.min_p) for p in params]
    return torch.tensor(rows, dtype=torch.float32)


def compute_probs(logits: Tensor, params: Sequence[SamplingParams], columns: Tensor | None = None) -> Tensor:
    """Return distributions [n, V] after temperature, top-k, top-p and min-p, in this order; each row by its own params.

    Logits are float32 [n, V]; temperatures must be above 0. `columns` are those of `sampling_columns`, where the caller
    has them on the device.
    """
    V = logits.shape[1]
    if columns is None:
        columns = to_device(sampling_columns(params, V), logits.device)
    temperature, k, top_p, min_p = (columns[:, i, None] for i in range(4))  # [n, 1] each
    x = logits - logits.amax(-1, keepdim=True)  # before dividing: a tiny temperature must not overflow
    x = x / temperature
    if any(0 < p.top_k < V or p.top_p < 1 for p in params):
        x, order = x.sort(stable=True, dim=-1, descending=True)  # of equal logits the lower token comes first
        x = x.masked_fill(torch.arange(V, device=x.device) >= k, -torch.inf)
        p_sorted = x.softmax(-1)
        mass_before = p_sorted.cumsum(-1) - p_sorted
        mass_before[:, 0] = -1.0  # the likeliest token is always kept, even if top_p is 0 in float32
        x = x.masked_fill((mass_before >= top_p) & (top_p < 1), -torch.inf)
        x = torch.empty_like(x).scatter_(-1, order, x)
    probs = x.softmax(-1)
    if any(p.min_p for p in params):
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def compute_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Return the model's log-probabilities of tokens [T], and the `num_top` likeliest, from raw logits [T, V]."""
    return select_logprobs(logits.log_softmax(-1), tokens, num_top)


def select_logprobs(logprobs: Tensor, tokens: Sequence[int], num_top: int) -> list[Logprob]:
    """Return the log-probabilities of tokens [T], and the `num_top` likeliest, from those of all tokens [T, V]."""
    chosen = logprobs.gather(1, to_device_like(logprobs, tokens)[:, None])[:, 0].tolist()
    best, best_tokens = logprobs.topk(min(num_top, logprobs.shape[1]))
    tops = [tuple(zip(*pair, strict=True)) for pair in zip(best_tokens.tolist(), best.tolist(), strict=True)]
    return [Logprob(*fields) for fields in zip(tokens, chosen, tops, strict=True)]
