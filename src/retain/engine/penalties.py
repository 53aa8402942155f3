"""Penalties and biases of one request's logits, kept while its text grows: a token adds what is new, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from retain.kernels.transfers import to_device_like
from retain.sampling_params import SamplingParams


class TokenCounts:
    """How often each token occurs in a text that grows at its end, as tensors on the device of logits.

    Adding tokens takes time in proportion to their number.
    """

    def __init__(self, like: Tensor):
        """`like`: a tensor on the device."""
        self._count: dict[int, int] = {}  # of each token, in the order in which they first occur
        self._place: dict[int, int] = {}  # of each token in the tensors
        self._ids = torch.zeros(16, dtype=torch.int64, device=like.device)
        self._times = torch.zeros_like(self._ids)

    @property
    def ids(self) -> Tensor:
        """The tokens that occur, int64 [n]."""
        return self._ids[: len(self._place)]

    @property
    def times(self) -> Tensor:
        """How often each of `ids` occurs, int64 [n]."""
        return self._times[: len(self._place)]

    def add(self, tokens: Sequence[int]) -> None:
        """Count the tokens that were added to the end of the text."""
        fresh = []
        added = Counter(tokens)
        for token, count in added.items():
            if token not in self._place:
                self._place[token] = len(self._place)
                fresh.append(token)
            self._count[token] = self._count.get(token, 0) + count
        if len(self._place) > len(self._ids):
            room = torch.zeros_like(self._ids[:1]).expand(2 * len(self._place) - len(self._ids))
            self._ids = torch.cat([self._ids, room])
            self._times = torch.cat([self._times, room])
        if fresh:
            self._ids[len(self._place) - len(fresh) : len(self._place)] = to_device_like(self._ids, fresh)
        self._change_times(added, 1)

    @contextmanager
    def extended(self, tokens: Sequence[int]) -> Iterator[None]:
        """Have tokens at the end of the text for the duration of the context."""
        self.add(tokens)
        try:
            yield
        finally:
            self._remove_last(tokens)

    def _remove_last(self, tokens: Sequence[int]) -> None:
        removed = Counter(tokens)
        self._change_times(removed, -1)
        for token, count in removed.items():
            self._count[token] -= count
            if not self._count[token]:  # the newest tokens are the last ones of the tensors
                del self._count[token], self._place[token]

    def _change_times(self, counts: Counter[int], sign: int) -> None:
        if counts:
            places = to_device_like(self._ids, [self._place[token] for token in counts])
            changes = to_device_like(self._ids, [sign * count for count in counts.values()])
            self._times.index_add_(0, places, changes)


class LogitPenalties:
    """The penalties and biases of one request. The repetition penalty counts its whole text, others its output."""

    def __init__(self, params: SamplingParams, like: Tensor):
        """`like`: a tensor on the device of the logits."""
        self._params = params
        self._num_tokens = 0
        self._text = TokenCounts(like)
        self._output = TokenCounts(like)
        self._counts_text = params.repetition_penalty != 1
        self._counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._biased = to_device_like(like, [token for token, _ in params.logit_bias])
        self._bias = to_device_like(like, [bias for _, bias in params.logit_bias], torch.float32)

    def update(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what is new of the request's tokens, prompt and output."""
        if self._counts_text:
            self._text.add(tokens[self._num_tokens :])
        if self._counts_output:
            self._output.add(tokens[max(self._num_tokens, num_prompt_tokens) :])
        self._num_tokens = len(tokens)

    def apply(self, logits: Tensor, drafts: Sequence[int] = ()) -> None:
        """Penalize and bias one row of logits [V], that after these drafts, in place."""
        params = self._params
        if self._counts_text:
            with self._text.extended(drafts):
                x = logits[self._text.ids]
                penalized = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
                logits[self._text.ids] = penalized
        if self._counts_output:
            with self._output.extended(drafts):
                logits[self._output.ids] -= params.presence_penalty + params.frequency_penalty * self._output.times
        if params.logit_bias:
            logits.index_add_(0, self._biased, self._bias)
