"""Pooled texts: the engine computes a prompt, and a reader makes a vector or a score of what it computed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from retain.formats.pooling import LAST, Pooling
from retain.processing.input import GenerateRequest, InputProcessor
from retain.processing.output import RequestOutputState
from retain.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)  # nobody reads it


class Reader(Protocol):
    """Reads rows as a prompt is computed: states of a model without a head, or logits."""

    needs_all: bool  # the rows of all tokens; else that of the last one

    def __call__(self, rows: Tensor) -> None:
        """Read the next rows; they are good until the call ends."""


class VectorReader:
    """Pools states [n, E] into a vector."""

    def __init__(self, pooling: Pooling):
        self.pooling = pooling
        self.needs_all = pooling.kind != LAST
        self._total = torch.zeros(0)
        self._num_rows = 0

    def __call__(self, rows: Tensor) -> None:
        """See Reader."""
        added = (rows.float().sum(0) if self.needs_all else rows[-1].float()).cpu()
        self._num_rows += len(rows)
        self._total = self._total + added if self.needs_all and len(self._total) else added.clone()

    def vector(self, dimensions: int | None = None) -> Tensor:
        """Return the vector, float32 [E], or its first `dimensions` numbers (Matryoshka, arXiv 2205.13147)."""
        mean = self._total / self._num_rows if self.needs_all else self._total
        cut = mean[:dimensions]
        return normalize(cut, dim=0) if self.pooling.normalize else cut


class ChoiceReader:
    """Reads how likely a model answers with one token rather than another."""

    needs_all = False

    def __init__(self, chosen: int, other: int):
        self.chosen = chosen
        self.other = other
        self.probability = 0.0  # of `chosen`, among both

    def __call__(self, rows: Tensor) -> None:
        """See Reader."""
        logits = rows[-1].float()
        self.probability = float(torch.sigmoid(logits[self.chosen] - logits[self.other]))


class PooledText(NamedTuple):
    """A text that is computed, and the reader of what is computed."""

    state: RequestOutputState
    reader: Reader


def prepare_pooled(processor: InputProcessor, generate_request: GenerateRequest, reader: Reader) -> PooledText:
    """Return the request that computes a prompt for a reader. Raises ValueError where it cannot be run."""
    g = replace(generate_request, params=ONE_TOKEN, needs_prompt_logprobs=reader.needs_all, pools=True)
    (state,) = processor.process(g, reader)
    return PooledText(state, reader)
