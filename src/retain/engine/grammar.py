"""The interface of grammars that constrain answers; `retain.processing.grammar` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """State of a grammar, for instance of a JSON schema, in one answer. The request passes it every token."""

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Set the logits of forbidden tokens to -inf, in place; row i of [K + 1, V] follows the first i of K drafts."""
        ...

    def accept_token(self, token: int) -> bool:
        """Advance by one token of the answer. Returns whether the answer ends with it."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the answer does not match the grammar, so that no token can follow."""
        ...
