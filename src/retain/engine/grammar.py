"""The interface of grammars that constrain answers; `retain.processing.grammar` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """State of a grammar, for instance of a JSON schema, in one answer. The output processor passes it every token."""

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Set the logits of forbidden tokens to -inf, in place; row i of [K + 1, V] follows the first i of K drafts.

        A row of which no token could be sampled stays as it is.
        """

    def accept_token(self, token: int) -> bool:
        """Advance by one token of the answer. Returns whether it may follow."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches the grammar, and ends with its last token."""

    @property
    def error(self) -> str:
        """Why the last token was refused, in words."""
