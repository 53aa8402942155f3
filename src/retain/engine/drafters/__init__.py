"""Drafters: who guesses a request's next tokens. One drafter is one file here, found by its name: `parse("ngram:k=8")`.

A file defines `class Drafter`, a dataclass whose fields are its options on the command line. What is not known here:
whether the guesses are right (speculate.py), and how many are worth their time (pace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kv.manager import KVCacheManager
from retain.plugins import load_plugin, plugin_names


@dataclass(frozen=True)
class TargetModel:
    """Whose tokens are guessed.

    `another` loads a model of that name with these weights, beside it; `lighter` itself, on the same cache.
    """

    runner: Runner
    cache: KVCacheManager
    load_draft_model: Callable[[str, str], tuple[Runner, KVCacheManager]]
    load_requantized_runner: Callable[[str], Runner]


class Drafter(Protocol):
    """What the engine asks of it."""

    k: str  # how many tokens at once; auto: as many as are worth it, up to `most`

    @property
    def max_draft_tokens(self) -> int:
        """See k."""
        ...

    def attach(self, target: TargetModel) -> None:
        """Before the first step. Raises ValueError where it cannot guess for this one."""
        ...

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """`Request.draft` up to so many tokens for each of these requests, who owe one token."""
        ...

    def remove_request(self, request: Request) -> None:
        """It has ended."""
        ...


def names() -> list[str]:
    """The drafters in this folder."""
    return plugin_names(__name__)


def parse(spec: str) -> Drafter:
    """The drafter that a text names. Raises ValueError with what is allowed."""
    drafter: Drafter = load_plugin(__name__, "Drafter", "drafter", spec)
    parse_draft_length(drafter)
    return drafter


def parse_draft_length(drafter: Drafter) -> int | None:
    """Its fixed number of tokens, or None for auto. Raises ValueError."""
    if drafter.k == "auto":
        return None
    if not drafter.k.isdigit() or not int(drafter.k):
        raise ValueError(f"k is auto or a number of tokens, not {drafter.k!r}")
    return int(drafter.k)
