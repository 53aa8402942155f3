"""The option `demote` of budgets: how many tokens beyond the budget stay, in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from retain.kernels.pool_dtypes import INT4
from retain.plugins import Amount, parse_amount

DEMOTED_DTYPE: torch.dtype = INT4


@dataclass(frozen=True)
class Demotion:
    """Tokens that a head keeps in 4 bits beyond its budget, in tokens or as a percentage of the prompt."""

    amount: Amount

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the option that "int4:50%" means. Raises ValueError."""
        dtype, colon, amount = text.partition(":")
        if dtype != "int4" or not colon:
            raise ValueError(f"{text!r} should be int4 and an amount, as in int4:50%")
        return cls(parse_amount(amount))

    def resolve(self, prompt_len: int) -> Self:
        """Return the option in tokens, at least 1."""
        return type(self)(Amount(tokens=max(self.amount.resolve(prompt_len), 1)))

    def __str__(self) -> str:
        return f"int4:{self.amount}"
