"""Drafters: who guesses a request's next tokens. One drafter is one file here, found by its name: `parse("ngram:k=8")`.

A file defines `class Drafter`, a dataclass whose fields are its options on the command line. What is not known here:
whether the guesses are right (speculate.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol

from retain.config import choice, options
from retain.engine.request import Request


class Drafter(Protocol):
    """What the engine asks of it."""

    def propose(self, asked: Sequence[tuple[Request, int]]) -> None:
        """`Request.draft` up to so many tokens for each of these requests, who owe one token."""
        ...

    def drop(self, request: Request) -> None:
        """It has ended."""
        ...


def names() -> list[str]:
    """The drafters in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def parse(text: str) -> Drafter:
    """The drafter that a text names. Raises ValueError with what is allowed."""
    name, given = choice(text)
    if name not in names():
        raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join(names())}")
    drafter: Drafter = options(importlib.import_module(f"{__name__}.{name}").Drafter, name, given)
    return drafter
