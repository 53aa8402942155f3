"""The option `demote` of budgets: how many tokens beyond the budget stay, in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from retain.kernels.slots.pool_dtypes import INT4
from retain.kv.memory.block_tables import UNBOUNDED
from retain.plugins import Amount, parse_amount

DEMOTED_DTYPE: torch.dtype = INT4


@dataclass(frozen=True)
class Demotion:
    """Tokens that a head keeps in 4 bits beyond its budget: in tokens, as a percentage of the prompt, or all."""

    amount: Amount | None  # None: all

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an option of demotion such as "int4:50%" or "int4". Raises ValueError."""
        dtype, colon, amount = text.partition(":")
        if dtype != "int4" or (colon and not amount):
            raise ValueError(f"{text!r} should be int4, or int4 and an amount, as in int4:50%")
        return cls(parse_amount(amount) if colon else None)

    def num_tokens(self, prompt_len: int) -> int:
        """Return the tokens that a head keeps in 4 bits at most, at least 1, for a prompt of `prompt_len` tokens."""
        return UNBOUNDED if self.amount is None else max(self.amount.resolve(prompt_len), 1)

    def resolve(self, prompt_len: int) -> Self:
        """Return the option for a prompt of `prompt_len` tokens, a percentage as a number of tokens."""
        return self if self.amount is None else type(self)(Amount(tokens=self.num_tokens(prompt_len)))

    def __str__(self) -> str:
        return "int4" if self.amount is None else f"int4:{self.amount}"
