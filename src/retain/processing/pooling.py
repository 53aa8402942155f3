"""Pooled texts: the engine computes a prompt, and a reader makes a vector or a score of what it computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from retain.formats.pooling import LAST, MEAN, Pooling
from retain.processing.input import GenerateRequest, InputProcessor, Prompt
from retain.processing.output import RequestOutputState
from retain.sampling_params import SamplingParams

T = TypeVar("T")
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)  # nobody reads it


class Reader(Protocol):
    """Reads rows as a prompt is computed: states of a model without a head, or logits."""

    reads_all: bool  # the rows of all tokens; else that of the last one

    def __call__(self, rows: Tensor) -> None:
        """Read the next rows; they are good until the call ends."""


class StateReader(Reader, Protocol):
    """Pools states [n, E] into one."""

    def state(self) -> Tensor:
        """Return the pooled state, float32 [E]."""


class LastReader:
    """Keeps the state of the last token."""

    reads_all = False

    def __init__(self) -> None:
        self._last = torch.zeros(0)

    def __call__(self, rows: Tensor) -> None:
        """Keep the last of these states."""
        self._last = rows[-1].float().cpu().clone()

    def state(self) -> Tensor:
        """Return the state of the last token, float32 [E]."""
        return self._last


class MeanReader:
    """Averages the states of all tokens."""

    reads_all = True

    def __init__(self) -> None:
        self._total = torch.zeros(1)
        self._num_rows = 0

    def __call__(self, rows: Tensor) -> None:
        """Add the hidden states of a step to the sum of which the mean is taken."""
        self._total = self._total + rows.float().sum(0).cpu()
        self._num_rows += len(rows)

    def state(self) -> Tensor:
        """Return the mean of the states, float32 [E]."""
        return self._total / self._num_rows


class ChoiceReader:
    """Reads how likely a model answers with one token rather than another."""

    reads_all = False

    def __init__(self, chosen: int, other: int):
        self.chosen = chosen
        self.other = other
        self.probability = 0.0  # of `chosen`, among both

    def __call__(self, rows: Tensor) -> None:
        """Read how likely one token is rather than the other, from the last row."""
        logits = rows[-1].float()
        self.probability = float(torch.sigmoid(logits[self.chosen] - logits[self.other]))


STATE_READERS: dict[str, Callable[[], StateReader]] = {LAST: LastReader, MEAN: MeanReader}


class PooledPlan(NamedTuple, Generic[T]):
    """Texts to prepare and to compute, stage by stage, and the result, to be asked for afterwards.

    A text is prepared shortly before it is computed: together the prompts of a call may be far longer than its body.
    """

    stages: Sequence[Sequence[Callable[[], RequestOutputState]]]
    result: Callable[[], T]


def prepare_pooled(processor: InputProcessor, generate_request: GenerateRequest, reader: Reader) -> RequestOutputState:
    """Return the request that computes a prompt for a reader. Raises ValueError where it cannot be run."""
    g = replace(generate_request, params=ONE_TOKEN, needs_prompt_logits=reader.reads_all, pools=True)
    (state,) = processor.process(g, reader)
    return state


def plan_vectors(
    processor: InputProcessor,
    pooling: Pooling | None,
    prompts: Sequence[Prompt],
    shared: GenerateRequest,
    dimensions: int | None = None,
) -> PooledPlan[list[Tensor]]:
    """Plan the vectors of prompts, float32 [E], or their first `dimensions` numbers (Matryoshka, arXiv 2205.13147).

    Other options are those of `shared`. Raises ValueError for a model that generates. Preparing a text raises it where
    that cannot be run.
    """
    if pooling is None:
        raise ValueError("this model generates and makes no embeddings (--pooling last or mean loads it for them)")
    readers = [STATE_READERS[pooling.kind]() for _ in prompts]
    texts = [
        partial(prepare_pooled, processor, replace(shared, prompt=prompt), reader)
        for prompt, reader in zip(prompts, readers, strict=True)
    ]

    def vectors() -> list[Tensor]:
        cut = [reader.state()[:dimensions] for reader in readers]
        return [normalize(state, dim=0) for state in cut] if pooling.normalize else cut

    return PooledPlan([texts], vectors)
