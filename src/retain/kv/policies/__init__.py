"""Policies: which tokens a head keeps. One policy is one file here, found by its name: `parse("ring:window=512")`.

A file defines `class Policy`, a frozen dataclass whose fields are its options on the command line, with

    budget      slots that a head keeps, or None for all
    priority(pos, mass, now) -> Tensor     over [L, G, S]: the slots with the lowest priority are forgotten first

`priority` is the definition. Where it rises with the position the cache uses the closed form, slot = pos mod capacity,
and nothing is ever looked for (tests/kv shows that both keep the same tokens). Scores that do not are not carried out
yet, and a test refuses a file with one.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from torch import Tensor

from retain.config import choice, options


class Policy(Protocol):
    """What the cache asks of a policy."""

    @property
    def budget(self) -> int | None:
        """Slots that a head keeps; None is all."""
        ...

    def priority(self, pos: Tensor, mass: Tensor | None, now: int) -> Tensor:
        """Higher stays. pos int32 [L, G, S] (-1 is a hole), mass float32 [L, G, S], `now` the newest position."""
        ...


def names() -> list[str]:
    """The policies in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def parse(text: str) -> Policy:
    """The policy that a text names. Raises ValueError with what is allowed."""
    name, given = choice(text)
    if name not in names():
        raise ValueError(f"unknown KV policy {name!r}: choose one of {', '.join(names())}")
    policy: Policy = options(importlib.import_module(f"{__name__}.{name}").Policy, name, given)
    return policy
