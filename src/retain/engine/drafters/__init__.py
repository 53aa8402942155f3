"""Drafters: each proposes the next tokens of requests. One drafter is one file: `parse("ngram:k=8")` reads ngram.py.

A file defines `class Drafter`, a dataclass whose fields are its options. Does not depend on: verification, and how many
drafts are worth their time (see spec_decode).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from retain.engine.cache_interface import RequestRow
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.files import quote
from retain.kv.manager import KVCacheManager
from retain.options import Bounds
from retain.plugins import load_plugin, plugin_names

DRAFT_LENGTH = Bounds(1)


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter reads of its target, beside tokens.

    `head`: one whose layer is a cache of the target, so that it is loaded with it: a folder, a .gguf file, or "" for
    the MTP layer of the target's own file. `weights` as in `Config`.
    """

    hidden_states: bool = False
    head: str | None = None
    weights: str = "auto"


@dataclass(frozen=True)
class TargetModel:
    """The model that a drafter drafts for, and ways to load others.

    `load_draft_model` takes the name of a model and its quantization; `load_requantized_runner` loads the target again
    with another quantization, to run on the same cache; `load_draft_head` takes the name of a head and its
    quantization, and returns what reads hidden states and that cache. It raises ValueError where the target gives none.
    `cached_head` runs the head that was loaded with the target, if there is one.
    """

    runner: Runner
    cache: KVCacheManager
    load_draft_model: Callable[[str, str], tuple[Runner, KVCacheManager]]
    load_requantized_runner: Callable[[str], Runner]
    load_draft_head: Callable[[str, str], Runner]
    cached_head: Runner | None = None


class Drafter(Protocol):
    """What the engine asks of a drafter, which guesses the next tokens of requests."""

    k: str  # drafts of a request in a round; auto: as many as are worth their time, at most max_draft_tokens

    @property
    def needs(self) -> DrafterNeeds:
        """What it reads of the target."""

    @property
    def max_draft_tokens(self) -> int:
        """Most drafts of a request in a round where k is auto."""

    def attach(self, target: TargetModel) -> None:
        """Prepare for the target, before the first step. Raises ValueError if the drafter cannot draft for it."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of these requests (`Request.set_drafts`), at most as many as each one's limit.

        Every request has one uncomputed token. `rows` are those of all running requests.
        """

    def remove_request(self, request: Request) -> None:
        """Drop the state of a request that has ended."""


def names() -> list[str]:
    """Return the names of all drafters."""
    return plugin_names(__name__)


def join_needs(named: Iterable[Drafter]) -> DrafterNeeds:
    """Return what drafters read of their target. Raises ValueError where the states that they read differ."""
    reading = {d.needs for d in named if d.needs.hidden_states}
    if len(reading) > 1:
        raise ValueError("an engine has one drafter that reads hidden states: assistant, eagle3 or mtp")
    return next(iter(reading), DrafterNeeds())


def parse(spec: str) -> Drafter:
    """Build the drafter of a spec. Raises ValueError that lists what is allowed."""
    drafter: Drafter = load_plugin(__name__, "Drafter", "drafter", spec)
    parse_draft_length(drafter)
    return drafter


def parse_draft_length(drafter: Drafter) -> int | None:
    """Return the fixed number of drafts, or None for auto. Raises ValueError."""
    if drafter.k == "auto":
        return None
    number = int(drafter.k) if re.fullmatch("[0-9]{1,20}", drafter.k) else 0
    if DRAFT_LENGTH.find_problem(number):
        raise ValueError(f"k must be auto, or {DRAFT_LENGTH}, not {quote(drafter.k)}")
    return number
