"""Checkpoints: what a text leaves behind at a position beside its append-only pages, so that others can go on there.

A kind of checkpoint is one file of this package, or a folder, found by its name. It defines `class CheckpointKind`,
and nothing else knows which kinds there are. A checkpoint completes the pages of a text: a row begins where each kind
lets it. Or it stands in for them: a row with a budget keeps a selection of a text, and another goes on from just that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.checkpoint_spans import PageRun
from retain.kv.stores.span import Span
from retain.kv.text import hash_key
from retain.plugins import load_module, plugin_names
from retain.types import Ints


class TextCheckpoint(Protocol):
    """What is left behind at a position. Its pages are held by reference: a row copies one before it writes into it."""

    @property
    def kind(self) -> str:
        """The name of the kind of checkpoint that this is."""

    @property
    def page_list(self) -> Ints:
        """All pages, each named once."""

    @property
    def needs_pages(self) -> bool:
        """Whether it completes pages of the text, and is of no use without them."""

    @property
    def position(self) -> int:
        """Where it was taken: the last position at which a text can go on with it."""

    @property
    def resumes_from(self) -> int:
        """The first position at which a text can go on with it."""

    @property
    def ladder_reach(self) -> int:
        """Tokens of the text behind it before which no other can be taken: it stands for a rung among them."""

    def runs(self) -> Sequence[PageRun]:
        """Return its pages in the order in which stores keep them."""


class Key(NamedTuple):
    """What checkpoints depend on beside the text, which has more than `last` tokens nowhere where they are taken.

    Where it `is_required`, no text of the same windows goes on without such a checkpoint, whatever its policy.
    """

    name: bytes
    last: int = 2**62
    is_required: bool = False


class Reach(NamedTuple):
    """The first and the last position at which a row may begin, as far as one kind is concerned."""

    first: int
    last: int


ANYWHERE = Reach(0, 2**62)
NOWHERE = Reach(0, 0)


@dataclass(frozen=True)
class Demand:
    """Who wants to go on: a resolved policy, the seed of its noise, and the most tokens that may be skipped."""

    policy: EvictionPolicy
    seed: int = 0
    max_length: int = 2**62


@dataclass(frozen=True)
class Moment:
    """When a row may leave checkpoints: `position` tokens of its text are computed, or more.

    `is_running` is false when the row ends, `has_pages` where it leaves the pages of these tokens, too. At the end of
    a chunk of a prompt `has_evicted` is set.
    """

    position: int
    num_computed: int
    is_running: bool = False
    has_pages: bool = False
    has_evicted: bool = False


class CheckpointedRow(Protocol):
    """What kinds know of a row. It `depends_on_text_alone` unless it went on from an answer.

    It `is_resumed` where it began with a selection of the text's tokens, in any order.
    """

    index: int
    evictors: list[BudgetEvictor]
    depends_on_text_alone: bool
    is_resumed: bool
    unstored: dict[bytes, TextCheckpoint]  # that wait until the pages of its text may be kept

    @property
    def demand(self) -> Demand:
        """What it asks the prefix cache for."""

    @property
    def prompt_len(self) -> int:
        """The number of tokens of the prompt."""

    def open_evictors(self, policy: BudgetPolicy) -> None:
        """Let an empty row evict under another resolved policy."""


@dataclass(frozen=True)
class SpanContent:
    """A checkpoint as stores keep it: its pages, and metadata."""

    checkpoint: TextCheckpoint
    metadata: bytes = b""


Own = TypeVar("Own", bound=TextCheckpoint)


class CheckpointKind(Protocol[Own]):
    """What the cache asks of a kind of checkpoint: when to capture one, and how a row goes on from it.

    It is made with the tables of the KV cache groups and their planner.
    """

    needs_pages: bool  # of all its checkpoints

    def keys(self, demand: Demand) -> Sequence[Key]:
        """Return the keys of checkpoints from which a row may go on; () where there are none for this demand."""

    def reach(self, demand: Demand, checkpoint: Own | None) -> Reach:
        """Return where a row may begin with a checkpoint, or without any of this kind."""

    def capture(self, row: CheckpointedRow, moment: Moment) -> Mapping[bytes, Own]:
        """Return what a row leaves at a moment, by key. Its pages are held once more. The host waits for no device."""

    def num_own_pages(self, row: CheckpointedRow, position: int, checkpoint: Own) -> int:
        """Return how many pages `attach` takes from the pool."""

    def due_at(self, position: int, checkpoint: Own) -> int:
        """Return where a row that begins at `position` attaches a checkpoint: there, or at a later position."""

    def attach(self, row: CheckpointedRow, position: int, checkpoint: Own) -> None:
        """Give a checkpoint to a row that goes on at a position. The pool has the pages that this takes."""

    def to_span(self, checkpoint: Own, position: int) -> SpanContent | None:
        """Return what stores keep of a checkpoint for texts that go on at a position; None for nothing.

        The position is where it was taken, or, where it needs pages, the last end of a block before that.
        """

    def from_span(self, demand: Demand, position: int, span: Span, metadata: bytes) -> Own:
        """Return the checkpoint of a span, whose pages are numbers from 0 on. Raises ValueError where it does not fit.

        With `with_pages` others take the places of these numbers.
        """

    def with_pages(self, checkpoint: Own, pages: Ints) -> Own:
        """Return a checkpoint of `from_span` in which `pages` [n] take the places of the numbers 0 to n - 1."""


AnyKind = CheckpointKind[Any]


def load_kinds(groups: Sequence[BlockTables], planner: CapacityPlanner) -> dict[str, AnyKind]:
    """Return the kinds of this folder, by name, for a cache."""
    names = plugin_names(__name__)
    modules: dict[str, Any] = {name: load_module(__name__, name, names, "kind of checkpoint") for name in names}
    return {name: module.CheckpointKind(groups, planner) for name, module in modules.items()}


def checkpoint_name(text_hash: bytes, key: bytes) -> bytes:
    """Return the name of the checkpoint of a key at the end of a text with this hash."""
    return hash_key(text_hash + key)
