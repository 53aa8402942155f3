"""press: keep the tokens that a press of kvpress scores highest: any object with its method `score`, unmodified.

`press=kvpress.SnapKVPress` is a class, which is made without arguments, `press=my_module.my_press` an object. It may
need keys, values, queries and what can be had of an attention module (`press_adapter.py`), but no attention weights and
no other layer. After the answer has begun, slots have the larger share of the score and of the answer's attention.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from retain.files import shorten
from retain.kv.eviction.press_adapter import call_press
from retain.kv.eviction.query_scored import QueryScoredPolicy
from retain.kv.eviction.view import CacheView


@dataclass(frozen=True, kw_only=True)
class Policy(QueryScoredPolicy):
    """Rank by the scores of a press."""

    press: str  # module.Class or module.object
    compares_heads = True  # a press may score the heads of a layer together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share == "all":
            raise ValueError("press: scores of a press are of one layer: share is none, fitted or layer")
        if self.heads != "kv-sum" or self.value != "none":
            raise ValueError("press: scores of a press are of a kv head: they go with heads=kv-sum and value=none")
        if not callable(getattr(self.scorer, "score", None)):
            raise ValueError(f"press: {self.press} has no method `score`")

    @property
    def score_key(self) -> tuple[object, ...]:
        """The budget, too: a press may score by its compression ratio."""
        return *super().score_key, self.budget

    @cached_property
    def scorer(self) -> Any:
        """The press. Raises ValueError where it cannot be imported or made."""
        module, _, name = self.press.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
            return found() if isinstance(found, type) else found
        except Exception as error:  # what a user's module does when it is imported
            raise ValueError(f"press: {self.press} cannot be used: {shorten(error)}") from error

    @property
    def query_blocks(self) -> Sequence[range]:
        """The whole prompt: a press sees it once."""
        return [range(self.prompt_len)] if self.prompt_len else []

    def score_queries(self, view: CacheView) -> Tensor:
        """Return the scores of the press, less the lowest of the layer."""
        ratio = max(1 - self.budget_tokens / self.prompt_len, 0.0)
        scores = call_press(self.scorer, view, ratio, self.kv_heads)  # [G, S]
        is_used = view.pos[0] >= 0
        lowest = self.kv_heads.gather(scores.where(is_used, float("inf")), 0).amin()
        return (scores - lowest).where(is_used, 0)[:, None]
