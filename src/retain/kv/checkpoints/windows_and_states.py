"""Windows of sliding layers, and states of linear layers: the rings of a row, which forget all older tokens.

A text of such a model goes on only where its rings were kept. A layer of linear attention keeps its state in a ring,
too, of the pages that its last tokens fold into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CapacityPlanner
from retain.kv.checkpoints import (
    ANYWHERE,
    NOWHERE,
    CheckpointedRow,
    Demand,
    Key,
    Moment,
    Reach,
    SpanContent,
)
from retain.kv.memory.block_tables import BlockTables
from retain.kv.stores.checkpoint_spans import PageRun
from retain.kv.stores.span import Span
from retain.types import Ints

KEY = Key(b"windows and states", is_required=True)  # on what they depend covers the first link of a text
NO_PAGES: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class WindowsAndStates:
    """The pages of a row's rings before a position, layer after layer of each KV cache group.

    Those of a layer, [G, n], begin with page `first_pages[i]` of the text. The layer is number `layers[i]` of the model
    and of the group `groups[i]`. A text can go on from position `resumes_from` or later.
    """

    position: int
    first_pages: tuple[int, ...]
    pages: tuple[Ints, ...]
    resumes_from: int
    groups: tuple[int, ...]
    layers: tuple[int, ...]
    kind = "windows_and_states"
    needs_pages = True
    ladder_reach = 0  # any position can be kept: rungs are kept themselves

    @cached_property
    def page_list(self) -> Ints:
        """All pages, each named once."""
        return np.concatenate([NO_PAGES, *(pages.ravel() for pages in self.pages)])

    def before(self, position: int, page_sizes: Sequence[int]) -> WindowsAndStates:
        """Return the pages before the first position of a page; `page_sizes` are those of each group."""
        layers = zip(self.pages, self.first_pages, self.groups, strict=True)
        pages = tuple(p[:, : position // page_sizes[g] - first] for p, first, g in layers)
        return replace(self, position=position, pages=pages)

    def runs(self) -> list[PageRun]:
        """Return the pages of each layer, which it reads first."""
        return [
            PageRun(g, False, pages.ravel(), layer)
            for g, layer, pages in zip(self.groups, self.layers, self.pages, strict=True)
        ]

    def num_own_pages(self, groups: Sequence[BlockTables], position: int) -> int:
        """Return how many pages a row copies that goes on at a position: those of the next token."""
        return sum(len(p) for p, g in zip(self.pages, self.groups, strict=True) if position % groups[g].page_size)

    def attach(self, groups: Sequence[BlockTables], row: int, position: int) -> None:
        """Put the pages into the rings of an empty row. Whole ones are shared, those of the next token copied."""
        for g, t in enumerate(groups):
            S = t.page_size
            t.rings[row].resumes_from = self.resumes_from
            layers = t.ring_layers(row).tolist()
            found = zip(self.first_pages, self.pages, self.groups, strict=True)
            own = [(first, pages) for first, pages, group in found if group == g]
            for layer, (begin, pages) in zip(layers, own, strict=True):
                first = first_visible_page(position, int(t.window[row, layer]), S)
                held = pages[:, first - begin : -(-position // S) - begin].copy()
                num_whole = position // S - first
                held[:, num_whole:] = t.store.copy_of(held[:, num_whole:], position)
                t.pool.incref(held[:, :num_whole])
                t.ring_base[row, layer] = first * S
                t.pages[row, layer, :, : held.shape[1]] = held
                t.counts[row, layer] = held.shape[1]
            if layers:
                t.peaks[row, layers] = t.counts[row, layers]
                t.mark_dirty(row)
                t.rings[row].are_shared = True


class CheckpointKind:
    """Leave the rings of windows and states at a position, and give them to rows that go on there."""

    needs_pages = True

    def __init__(self, groups: Sequence[BlockTables], planner: CapacityPlanner):
        self.groups = groups
        self.planner = planner

    def keys(self, demand: Demand) -> Sequence[Key]:
        """Return a key where a layer slides."""
        return (KEY,) if (self.planner.windows(demand.policy) < NO_WINDOW).any() else ()

    def reach(self, demand: Demand, checkpoint: WindowsAndStates | None) -> Reach:
        """Return all positions that the rings allow."""
        if checkpoint:
            return Reach(checkpoint.resumes_from, ANYWHERE.last)
        return NOWHERE if self.keys(demand) else ANYWHERE

    def capture(self, row: CheckpointedRow, moment: Moment) -> Mapping[bytes, WindowsAndStates]:
        """Capture the rings of windows and states of a row, if the pages of its other layers stay in the cache."""
        if not moment.has_pages or not self.keys(row.demand):
            return {}
        found = capture_rings(self.groups, row.index, moment.position)
        if found and moment.is_running:
            for t in self.groups:
                t.note_shared_rings(row.index, moment.num_computed)
        return {KEY.name: found} if found else {}

    def num_own_pages(self, row: CheckpointedRow, position: int, checkpoint: WindowsAndStates) -> int:
        """Count the pages of the next token."""
        return checkpoint.num_own_pages(self.groups, position)

    def due_at(self, position: int, checkpoint: WindowsAndStates) -> int:
        """Return the position: rings are there from the beginning on."""
        return position

    def attach(self, row: CheckpointedRow, position: int, checkpoint: WindowsAndStates) -> None:
        """Put the pages into the rings of the row."""
        checkpoint.attach(self.groups, row.index, position)

    def to_span(self, checkpoint: WindowsAndStates, position: int) -> SpanContent | None:
        """Return the pages before the end of a block, unless tokens that a query there sees are gone."""
        if checkpoint.resumes_from > position:
            return None
        return SpanContent(checkpoint.before(position, [t.page_size for t in self.groups]))

    def from_span(self, demand: Demand, position: int, span: Span, metadata: bytes) -> WindowsAndStates:
        """Number the pages of the layers that slide. Raises ValueError where these are other layers or pages."""
        sliding = [
            (g, int(layer), int(window))
            for g, (t, own) in enumerate(zip(self.groups, self.planner.groups, strict=True))
            for layer, window in zip(t.layers, own.windows(demand.policy), strict=True)
            if window < NO_WINDOW
        ]
        if len(sliding) != len(span.num_blocks):
            raise ValueError(f"{len(span.num_blocks)} sliding layers, not {len(sliding)}")
        first_pages = []
        pages = []
        begin = 0
        for (g, _, window), n in zip(sliding, span.num_blocks, strict=True):
            G = self.groups[g].counts.shape[2]
            S = self.groups[g].page_size
            first_pages.append(position // S - n // G)
            if first_pages[-1] != first_visible_page(position, window, S):
                raise ValueError(f"{n} pages are no window")
            pages.append(np.arange(begin, begin + n, dtype=np.int32).reshape(G, -1))
            begin += n
        groups, layers, _ = zip(*sliding, strict=True)
        return WindowsAndStates(position, tuple(first_pages), tuple(pages), span.resumes_from, groups, layers)

    def with_pages(self, checkpoint: WindowsAndStates, pages: Ints) -> WindowsAndStates:
        """Return the checkpoint with its rings in other pages."""
        return replace(checkpoint, pages=tuple(pages[numbers] for numbers in checkpoint.pages))


def first_visible_page(position: int, window: int, page_size: int) -> int:
    """Return the page with the oldest token that a query at `position` sees."""
    return max(position - window + 1, 0) // page_size


def capture_rings(groups: Sequence[BlockTables], row: int, end: int) -> WindowsAndStates | None:
    """Return the pages of the row's rings as they are before position `end`, which are held once more.

    Where the row has computed more than that, it may have written over tokens that no query at `end` sees. The pages
    of such tokens are copies without them: a row that goes on from `end` must not see them.

    None where too much of a window is overwritten, or the pool has no pages for the copies.
    """
    first_pages = []
    found: list[tuple[int, Ints]] = []  # group and pages of each layer
    overwritten: list[Ints] = []  # numbers of the pages of each layer that may hold later tokens
    resumes_from = max(t.rings[row].resumes_from for t in groups)
    layers = [(g, t, layer) for g, t in enumerate(groups) for layer in t.ring_layers(row)]
    for g, t, layer in layers:
        S = t.page_size
        end_page = -(-end // S)
        block_begin = end // t.block_size * t.block_size  # where a tier lets texts resume; the tree does at `end`
        W, capacity, base = (int(x[row, layer]) for x in (t.window, t.capacity, t.ring_base))
        first = max((block_begin - W + 1) // S, end_page - capacity // S, base // S, 0)
        places = (np.arange(first, end_page) * S - base) % capacity // S
        pages: Ints = t.pages[row, layer][:, places]
        first_pages.append(first)
        found.append((g, pages))
        # Nothing is read from the device: a later token, or a rejected draft, took the place of each one before `kept`.
        kept = min(t.rings[row].written_upto - capacity, end)
        overwritten.append(np.arange(max(-(-kept // S) - first, 0), dtype=np.int32))
        begin = max(kept, first * S)
        resumes_from = max(resumes_from, begin + W - 1 if begin else 0)
    if resumes_from > end:
        return None
    pool = groups[0].pool
    copied = [pages[:, i] for (_, pages), i in zip(found, overwritten, strict=True)]
    num_copied = sum(pages.size for pages in copied)
    held = np.setdiff1d(np.concatenate([p.ravel() for _, p in found]), np.concatenate([p.ravel() for p in copied]))
    pool.incref(held)
    if num_copied and not pool.ensure_free(num_copied):
        pool.free(held)
        return None
    with pool.owned() as owned:
        owned.append(held)
        for (g, pages), i, own in zip(found, overwritten, copied, strict=True):
            if len(i):
                pages[:, i] = groups[g].store.copy_of(own, end)
                owned.append(pages[:, i].ravel())
    return WindowsAndStates(
        position=end,
        first_pages=tuple(first_pages),
        pages=tuple(pages for _, pages in found),
        resumes_from=resumes_from,
        groups=tuple(g for g, _ in found),
        layers=tuple(int(t.layers[layer]) for _, t, layer in layers),
    )
