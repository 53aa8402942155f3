"""Where a row begins in its text: what the prefix cache found, what the row was given of it, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from retain.kv.checkpoints import AnyKind, Demand, TextCheckpoint
from retain.kv.prefix.history import SeenText
from retain.kv.prefix.node import NO_BLOCKS, Node
from retain.kv.stats.request import LoadStats
from retain.kv.stores.loader import LayerLoader
from retain.kv.stores.store import SpanRange
from retain.kv.text import Text
from retain.types import Ints

NO_TOKENS: Ints = np.zeros(0, np.int32)


class HeldCheckpoint(NamedTuple):
    """A checkpoint that a node of the prefix tree holds in memory."""

    kind: AnyKind
    key: bytes
    checkpoint: TextCheckpoint
    node: Node


class StoredCheckpoint(NamedTuple):
    """A checkpoint that a store holds, by its place there."""

    kind: AnyKind
    key: bytes
    place: SpanRange


@dataclass(frozen=True)
class Start:
    """Where a row may begin: after `position` tokens of a text, with blocks [K, n] and checkpoints, or with spans.

    The row shares the pages of the first `shared_length` tokens of the blocks, and copies the others. If it
    `is_selective`, only some blocks of the spans are loaded; the row gets pages for all of them. At `branch_point` more
    texts could branch off (0: nowhere), if the row left checkpoints there. `further` is where it may begin with spans
    of stores, if loading them takes less time than computing.
    """

    text: Text
    demand: Demand
    position: int = 0
    blocks: Ints = field(default_factory=lambda: NO_BLOCKS)
    shared_length: int = 0
    nodes: Sequence[Node] = ()  # that hold these blocks
    checkpoints: Sequence[HeldCheckpoint] = ()
    span_ranges: Sequence[SpanRange] = ()  # of blocks behind those of the tree
    is_selective: bool = False
    stored: Sequence[StoredCheckpoint] = ()
    branch_point: int = 0
    num_shared_pages: int = 0  # that are in the tables of rows already
    further: Start | None = None

    @property
    def page_list(self) -> Ints:
        """The pages of the tree that it needs."""
        return np.concatenate([self.blocks[self.blocks > 0], *(c.checkpoint.page_list for c in self.checkpoints)])


class MissReason(Enum):
    """Why a prompt began with no more cached tokens than it did."""

    COMPLETE = "complete"  # it began with everything that can be skipped
    WHOLE_BLOCKS = "whole_blocks"  # more of it is known, inside a block: running texts and tiers share whole ones
    NEW_TEXT = "new_text"  # it continues a cached text, and nothing was computed before
    FIRST_TEXT = "first_text"  # no text of this salt is known
    DIVERGED = "diverged"  # the nearest text goes on with other tokens
    EVICTED = "evicted"
    NOT_STORED = "never_kept"  # it was computed, but not kept
    IN_PROGRESS = "in_progress"  # another request is computing it
    OTHER_POLICY = "policy"  # it was computed with other windows, so under another policy
    OWN_POLICY = "own_policy"  # the request's policy needs the queries of these tokens
    NO_SNAPSHOT = "no_snapshot"  # nothing of sliding layers is kept between what it began with and what is cached
    NO_STATE = "no_state"  # the same between what a budget went on from and what it has seen of the text
    NO_PAGES = "no_pages"  # the pool had no pages to attach it
    NOT_LOADED = "not_loaded"  # a tier has it, and computing was estimated to be faster
    OTHER_FORMAT = "precision"  # a tier has it in another precision or page size
    OFF = "off"  # the engine caches no prefixes

    @property
    def is_miss(self) -> bool:
        """Whether more could have been there. If not, the prompt had nothing to begin with."""
        return self not in (MissReason.COMPLETE, MissReason.WHOLE_BLOCKS, MissReason.NEW_TEXT, MissReason.FIRST_TEXT)


@dataclass(frozen=True)
class PrefixDiagnosis:
    """What a prompt began with, and why not with more."""

    prompt: Ints
    num_cached_tokens: int
    reason: MissReason = MissReason.COMPLETE
    nearest: Ints = field(default_factory=lambda: NO_TOKENS)  # the nearest cached text of the same salt
    common_length: int = 0  # tokens that the prompt and the nearest text share
    known_length: int = 0  # tokens that were computed before, whatever became of them
    age: float | None = None  # seconds since the eviction
    detail: str = ""  # a policy, an option, or a format

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that had to be computed."""
        return len(self.prompt) - self.num_cached_tokens


@dataclass(frozen=True)
class Begun:
    """What a row was given: `position` computed tokens, and checkpoints that are due when it has computed more.

    `load` is still reading; `is_sparse` where it reads only important tokens. `state_load` has read a checkpoint.
    `seen` is the text in the history. `diagnosis` says why there are no more tokens, where that was asked for.
    """

    position: int = 0
    branch_point: int = 0  # where the row leaves checkpoints, so that more texts can branch off; 0: nowhere
    due: Sequence[HeldCheckpoint] = ()
    load: LayerLoader | None = None
    is_sparse: bool = False
    state_load: LoadStats | None = None
    seen: SeenText | None = None
    diagnosis: PrefixDiagnosis | None = None
