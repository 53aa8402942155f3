"""What the host derives of a row's rings, where it keeps their windows, equals the positions in the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from retain.engine import drafters
from retain.kv.checkpoints import budget, windows_and_states
from retain.kv.checkpoints.windows_and_states import WindowsAndStates, capture_rings
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow
from tests.helpers.state_family import state_family as state_family

pytestmark = pytest.mark.usefixtures("state_family")
POLICIES = ["full", "full", "sinks:budget=40,interval=4", "h2o:budget=40,interval=4", "reread:budget=40"]


class CheckedCapture:
    """Captures windows, and compares them with what the pool holds. `num_captured` and `num_copied` count."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_copied = 0

    def __call__(self, groups: Sequence[BlockTables], row: int, end: int) -> WindowsAndStates | None:
        in_pool = [_read_ring(t, row, layer, end) for t in groups for layer in t.ring_layers(row)]
        expected = max((begin + window - 1 if begin else 0 for _, begin, window, _ in in_pool), default=0)
        found = capture_rings(groups, row, end)
        self.num_captured += 1
        if found is None:
            assert expected > end
            return None
        assert found.resumes_from == expected
        for pages, (held, _, _, overwritten) in zip(found.pages, in_pool, strict=True):
            copied = np.flatnonzero(pages[0] != held[0])
            assert set(overwritten) <= set(copied.tolist())
            self.num_copied += len(copied)
        return found


def _read_ring(t: BlockTables, row: int, layer: int, end: int) -> tuple[Ints, int, int, set[int]]:
    """Return a ring's pages, the first token from which on all are there, its window, and pages with later tokens."""
    S = t.page_size
    W, capacity, base = (int(x[row, layer]) for x in (t.window, t.capacity, t.ring_base))
    first = max((end // t.block_size * t.block_size - W + 1) // S, -(-end // S) - capacity // S, base // S, 0)
    pages = t.pages[row, layer][:, (np.arange(first, -(-end // S)) * S - base) % capacity // S]
    expected = np.arange(first * S, end)
    actual = t.kv.pos[t.kv.to_index(pages[0])].flatten()[: len(expected)].numpy()
    lost = expected[actual != expected]
    later = {int(i) // S for i in np.flatnonzero(actual >= end)}
    return pages, int(lost[-1]) + 1 if len(lost) else first * S, W, later


@pytest.mark.parametrize("family", ["gemma3_text", "state", *slow("mistral", "qwen3_next")])
@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
def test_what_the_host_derives_of_rings_is_what_the_pool_holds(
    family: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are rejected, scoring passes, forks, rows that begin with windows, and rows that are preempted."""
    check = CheckedCapture()
    for module in (budget, windows_and_states):
        monkeypatch.setattr(module, "capture_rings", check)
    rng = random.Random(seed)
    engine = make_engine(
        family,
        backend="cpu",
        prefix_cache="exact",
        snapshot_interval=32,
        max_batched_tokens=48,
        num_pages=rng.choice([400, 4000]),
        drafter=drafters.parse("ngram:k=4,min=1"),
    )
    engine.depth = rng.choice([1, 2])
    texts = [[rng.randrange(6) for _ in range(rng.randrange(20, 120))] for _ in range(4)]
    for _ in range(4):
        requests = []
        for _ in range(3):
            prompt = rng.choice(texts)[: rng.randrange(15, 120)] + [
                rng.randrange(6) for _ in range(rng.randrange(1, 9))
            ]
            copies = [
                make_request(prompt, rng.randrange(1, 40), rng.choice(POLICIES)) for _ in range(rng.choice([1, 2]))
            ]
            requests += copies
        engine.add(*requests)
        for step in range(2000):
            if not engine.has_unfinished_requests:
                break
            engine.step()
            if step == 5 and (running := list(engine.scheduler.running)):
                engine.scheduler.preempt(rng.choice(running))
        texts.append(requests[0].tokens)
        engine.cache.check()
    assert check.num_captured > 10
