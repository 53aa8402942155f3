"""A step that fails loses no page: whatever raises while texts are left or gone on from, the counts still agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retain.kv.checkpoints import budget, masses, windows_and_states
from retain.kv.memory.page_store import PageStore
from retain.kv.prefix.radix_tree import RadixTree
from retain.kv.stores.checkpoint_spans import CheckpointSpans
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import every_third, slow
from tests.helpers.tiers import offloader_of

FAILING = [
    (PageStore, "copy"),
    (PageStore, "punch_from"),
    (PageStore, "allocate"),
    (RadixTree, "insert"),
    (CheckpointSpans, "allocate"),
    (CheckpointSpans, "upload"),
    *((k.CheckpointKind, name) for k in (budget, masses, windows_and_states) for name in ("capture", "attach")),
    *((k.CheckpointKind, "with_pages") for k in (budget, windows_and_states)),
]
ROWS = {
    "states": ("lfm2", "full"),
    "rings": ("gemma3_text", "full"),
    "a ring": ("llama", "ring:window=24"),
    "masses": ("gemma3_text", "h2o:budget=50%"),
    "streamed": ("llama", "window:budget=30,prefill=stream,chunk=20"),
}


class BrokenError(Exception):
    """What the call under test raises."""


def fails_at(function: Callable[..., Any], calls: set[int]) -> Callable[..., Any]:
    """Return the function, which raises at the calls of these numbers."""
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in calls:
            raise BrokenError
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("calls", [{1, 5, 9}, *slow({2, 7, 12, 17})], ids=str)
@pytest.mark.parametrize("row", every_third(ROWS))
@pytest.mark.parametrize("failing", FAILING, ids=lambda f: f"{f[0].__module__.rpartition('.')[2]}.{f[1]}")
def test_a_step_that_fails_loses_no_page(
    failing: tuple[type, str], row: str, calls: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    family, policy = ROWS[row]
    first = rng.choices(range(128), k=70)
    ends = [(48, 0), (48, 9), (70, 5), (37, 30), (48, 9), (70, 16), (33, 40)]
    texts = [first[:n] + rng.choices(range(128), k=more) for n, more in ends]
    engine = make_engine(
        family, prefix_cache="exact", snapshot_interval=32, tiers=[f"disk:path={tmp_path},capacity=50MB"]
    )
    tree = engine.cache.prefix_cache.tree
    owner, name = failing
    monkeypatch.setattr(owner, name, fails_at(getattr(owner, name), calls))
    for text in texts * 2:
        request = make_request(text, 4, policy)
        engine.add(request)
        while engine.has_unfinished_requests:
            try:
                engine.step()
            except BrokenError:
                engine.cancel(request)
            engine.cache.check()
        offloader_of(engine).sync()
        while tree.num_evictable_pages and len(text) % 2:  # the next one loads
            try:
                tree.evict(tree.num_evictable_pages)
            except BrokenError:
                continue
        engine.cache.check()
    tree.clear()
    engine.cache.check()
    assert not engine.cache.pool.num_used
    engine.cache.prefix_cache.close_offloader()
