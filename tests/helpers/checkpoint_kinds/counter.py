"""A kind of checkpoint that lives in tests only: how many tokens of its text there were. No text goes on without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import NOWHERE, CheckpointedRow, Demand, Key, Moment, Reach, SpanContent
from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.checkpoint_spans import PageRun
from retain.kv.stores.span import Span
from retain.types import Ints

KEY = Key(b"counter", is_required=True)
NO_PAGES: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Count:
    position: int
    kind = "counter"
    page_list = NO_PAGES
    needs_pages = True
    ladder_reach = 0

    @property
    def resumes_from(self) -> int:
        return self.position

    def runs(self) -> Sequence[PageRun]:
        return ()


class CheckpointKind:
    needs_pages = True
    attached: ClassVar[list[tuple[int, int]]] = []  # where rows went on, and what they were given

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner):
        self.attached.clear()

    def keys(self, demand: Demand) -> Sequence[Key]:
        return (KEY,)

    def reach(self, demand: Demand, checkpoint: Count | None) -> Reach:
        return Reach(checkpoint.position, checkpoint.position) if checkpoint else NOWHERE

    def capture(self, row: CheckpointedRow, moment: Moment) -> Mapping[bytes, Count]:
        return {KEY.name: Count(moment.position)} if moment.has_pages else {}

    def num_own_pages(self, row: CheckpointedRow, position: int, checkpoint: Count) -> int:
        return 0

    def due_at(self, position: int, checkpoint: Count) -> int:
        return position

    def attach(self, row: CheckpointedRow, position: int, checkpoint: Count) -> None:
        self.attached.append((position, checkpoint.position))

    def to_span(self, checkpoint: Count, position: int) -> SpanContent | None:
        return SpanContent(checkpoint, str(position).encode()) if checkpoint.position == position else None

    def from_span(self, demand: Demand, position: int, span: Span, metadata: bytes) -> Count:
        return Count(int(metadata))

    def with_pages(self, checkpoint: Count, pages: Ints) -> Count:
        return checkpoint
