"""Policies: which tokens a head keeps. One policy is one file here, found by its name: `parse("ring:window=512")`.

A file defines `class Policy`, a frozen dataclass whose fields are its options on the command line, with

    window                      tokens that a head keeps, where that has a closed form: slot = pos mod capacity
    resolved(prompt, system)    the same for a prompt of so many tokens, the first `system` a system prompt
    priority(view) -> Tensor    over [L, G, S]: the slots with the lowest priority are forgotten first

`priority` is the definition. Where it is the position the cache uses the closed form and nothing is ever looked for
(tests/kv shows that both keep the same tokens). All others are `Budget`s (kv/budget.py): they have its options too, and
the cache looks at what they keep.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from retain.kv.eviction.view import CacheView
from retain.plugins import load_plugin, plugin_names


class Policy(Protocol):
    """What the cache asks of a policy."""

    @property
    def window(self) -> int | None:
        """Tokens that a head keeps, the newest; None: all, or not in closed form."""
        ...

    def resolve(self, prompt_len: int, system_len: int = 0) -> Policy:
        """For a prompt of so many tokens, the first `system` of them a system prompt."""
        ...

    def priority(self, view: CacheView) -> Tensor:
        """Higher stays: a number for each slot, [L, G, S]; those of holes mean nothing."""
        ...


def names() -> list[str]:
    """The policies in this folder."""
    return plugin_names(__name__)


def parse(spec: str) -> Policy:
    """The policy that a text names. Raises ValueError with what is allowed."""
    policy: Policy = load_plugin(__name__, "Policy", "KV policy", spec)
    return policy


def name_of(policy: Policy) -> str:
    """The name of its file."""
    return type(policy).__module__.rpartition(".")[2]


def to_spec(policy: Policy) -> str:
    """What `parse` makes it of, options at their defaults left out."""
    given = [
        f"{f.name}={getattr(policy, f.name)}"
        for f in dataclasses.fields(policy)  # type: ignore[arg-type]
        if f.init and getattr(policy, f.name) != f.default
    ]
    name = name_of(policy)
    return f"{name}:{','.join(given)}" if given else name
