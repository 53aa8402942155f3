"""Sampling parameters of a request. Does not depend on: torch, or how tokens are sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when to stop. Raises ValueError for a value out of range."""

    max_tokens: int | None = None  # None: to the end of the context, or as far as the KV memory reaches
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0  # of the likeliest token's probability
    repetition_penalty: float = 1.0  # of tokens in prompt or answer (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # subtracted once from tokens in the answer
    frequency_penalty: float = 0.0  # subtracted for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to the logits of these tokens
    seed: int | None = None
    stop: tuple[str, ...] = ()  # strings; the text ends before them
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0: of the drawn tokens; n: and of the n likeliest
    n: int = 1  # answers to each prompt

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        ranges: dict[str, tuple[float, float]] = {
            "max_tokens": (1, math.inf),
            "temperature": (0, math.inf),
            "top_k": (0, math.inf),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "repetition_penalty": (0, math.inf),
            "presence_penalty": (-math.inf, math.inf),
            "frequency_penalty": (-math.inf, math.inf),
            "seed": (0, 2**63 - 1),
            "logprobs": (0, 100),
            "n": (1, 1024),
        }
        for name, (lo, hi) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (lo <= value <= hi and math.isfinite(value)):
                raise ValueError(f"{name} must be from {lo:g} to {hi:g}, not {value}")
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise ValueError("top_p and repetition_penalty must be above 0")
        if any(not s for s in self.stop):
            raise ValueError("a stop string must not be empty")

    @property
    def greedy(self) -> bool:
        """The likeliest token, always."""
        return self.temperature == 0

    @property
    def has_penalties_or_bias(self) -> bool:
        """Some token's logit is not the model's own."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias) != (
            1.0,
            0,
            0,
            (),
        )
