"""What policies with a budget have in common: their sizes, who is never forgotten, and what they want to see.

A head keeps `budget` tokens: the first `sinks`, the last `recent`, and of the rest those with the highest priority. It
fills `interval` more slots before it forgets as many at once (1 is the papers'; more costs less). The prompt is
computed exactly and the budget begins behind it; or, with `prefill=stream`, it holds after every chunk, so that a
prompt of any length takes bounded memory. What is not known here: pages, slots, who carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.config import Amount
from retain.kernels import NO_NOISE

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Watch:
    """What fresh queries of one request leave on its slots; see `Observe` in kernels/__init__.py."""

    weights: Floats  # [n], one a fresh token
    tau: Floats | None = None  # [n]; None is 1
    decay: float = 1.0
    noise: int = NO_NOISE
    anew: bool = True


THIRTY_PERCENT = Amount(share=0.3)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Options of every policy that is carried out by looking. Raises ValueError."""

    budget: Amount  # tokens that a head keeps, or a percentage of the prompt
    recent: Amount = THIRTY_PERCENT  # of them the newest, in tokens or as a percentage of the budget
    sinks: int = 0  # of them the first of the text
    interval: int = 16
    prefill: str = "exact"  # or stream
    prompt: int = field(default=0, init=False)  # tokens, once it is known

    window = None  # nothing is known in closed form

    def __post_init__(self) -> None:
        if self.interval < 1 or self.sinks < 0:
            raise ValueError(f"interval must be at least 1 and sinks 0, not {self.interval} and {self.sinks}")

        if self.prefill not in ("exact", "stream"):
            raise ValueError(f"prefill is exact or stream, not {self.prefill!r}")

    def resolved(self, prompt: int) -> Self:
        """The same for a prompt of so many tokens, its amounts in tokens."""
        budget = max(self.budget.of(prompt), self.sinks + 1)
        recent = min(max(self.recent.of(budget), 1), budget - self.sinks)
        found = replace(self, budget=Amount(tokens=budget), recent=Amount(tokens=recent))
        object.__setattr__(found, "prompt", prompt)
        return found

    @property
    def size(self) -> int:
        """The budget in tokens; resolved."""
        return self.budget.of(self.prompt)

    @property
    def slots(self) -> int:
        """That a head fills at most while it generates; resolved."""
        return self.size + self.interval

    def slots_of_prompt(self, owed: int, chunk: int) -> int:
        """That a head fills at most while `owed` tokens are computed, `chunk` at a time; resolved."""
        return owed if self.prefill == "exact" else min(owed, self.size + chunk)

    def protected(self, pos: Tensor, now: int) -> Tensor:
        """Who must stay, bool of the shape of `pos`."""
        return (pos < self.sinks) | (pos > now - self.recent.of(self.size))

    def watch(self, pos: NDArray[np.int32], expected: int) -> Watch | None:
        """What the fresh tokens at these positions leave; None: nothing. `expected` tokens will be generated."""
        return None

    def priority(self, pos: Tensor, mass: Tensor, now: int) -> Tensor:
        """See Policy."""
        raise NotImplementedError
