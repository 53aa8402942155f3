"""What the engine asks of a form that an answer is to have. text/form.py has those that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """What an answer may be: JSON, say. It follows the answer token by token."""

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Make -inf, in place, what may not come next, in logits [K + 1, V]; row i comes behind i of K drafts."""
        ...

    def accept_token(self, token: int) -> bool:
        """It came. True: nothing can follow."""
        ...

    @property
    def failed(self) -> bool:
        """It cannot be followed any more."""
        ...
