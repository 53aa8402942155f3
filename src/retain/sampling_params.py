"""Sampling parameters of a request, each with its help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from retain.options import Bounds, NonNegativeInt, Probability, check_bounds, option

NUM_SEEDS = 2**63
MAX_STOP_LENGTH = 4096  # characters of all stop strings together
MAX_BIAS = 1e4  # of penalties and biases of logits: sums of more would lose the logits' digits
Penalty = Annotated[float, Bounds(-MAX_BIAS, MAX_BIAS)]
Length = Annotated[int, Bounds(1, 2**31 - 1)]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample the tokens of an answer, and when to stop. Raises ValueError for a value out of range."""

    max_tokens: Length | None = option(
        None, "output tokens at most (default: up to the end of the context; on the command line at most 512)"
    )
    min_tokens: NonNegativeInt = option(0, "output tokens at least, before an end token, a stop token or a stop string")
    temperature: Annotated[float, Bounds(0, 1e30)] = option(1.0, "softmax temperature; 0 is greedy")
    top_k: Annotated[int, Bounds(-1, 2**31 - 1)] = option(0, "sample from the K likeliest tokens; 0 or -1 is all")
    top_p: Probability = option(1.0, "sample from the likeliest tokens of total probability P; 0 is greedy")
    min_p: Probability = option(0.0, "least probability, as a share of the likeliest token's")
    # CTRL, arXiv 1909.05858
    repetition_penalty: Annotated[float, Bounds(0.01, 100)] = option(1.0, "penalizes tokens of prompt and output")
    presence_penalty: Penalty = option(0.0, "subtracted once for each token of the output")
    frequency_penalty: Penalty = option(0.0, "subtracted for each occurrence in the output")
    logit_bias: tuple[tuple[int, float], ...] = option((), "pairs (token id, number added to its logit)")
    seed: Annotated[int, Bounds(-1, NUM_SEEDS - 1)] | None = option(
        None, "seed of the random numbers (default, and -1: a random one)"
    )
    stop: tuple[str, ...] = option(
        (), f"end the output before this text (may be repeated; {MAX_STOP_LENGTH} characters in all)"
    )
    stop_token_ids: tuple[NonNegativeInt, ...] = option((), "end the output with one of these tokens")
    ignore_eos: bool = option(False, "do not stop at the end-of-text token")
    logprobs: Annotated[int, Bounds(0, 100)] | None = option(
        None, "log-probabilities of the sampled tokens and the N likeliest (run: with --json)"
    )
    n: Annotated[int, Bounds(1, 1024)] = option(1, "answers to each prompt")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check_bounds(self)
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}: at most max_tokens, which is {self.max_tokens}")
        if not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):  # NaN is refused, too
            raise ValueError(f"a logit_bias must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        check_stop_strings(self.stop)

    def for_answer(self, index: int) -> Self:
        """Return the parameters of one of the `n` answers: each has a seed of its own, the last seed is before 0."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % NUM_SEEDS)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_p == 0

    @property
    def has_penalties_or_bias(self) -> bool:
        """Whether a penalty or a bias changes the logits."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or penalties != (0, 0) or bool(self.logit_bias)


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise ValueError where one of the stop strings is empty, or all together are too long."""
    if not all(strings):
        raise ValueError("a stop string must not be empty")
    if (length := sum(map(len, strings))) > MAX_STOP_LENGTH:
        raise ValueError(f"the stop strings have {length} characters together: at most {MAX_STOP_LENGTH}")
