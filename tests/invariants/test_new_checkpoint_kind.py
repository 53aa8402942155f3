"""A new kind of checkpoint is one file: it works in the pool, in every store and after a restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv import checkpoints
from tests.helpers import checkpoint_kinds
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.tiers import disk_spec, offloader_of

PLACES = ["pool", "ram", "folder", "object store", "folder after a restart", "object store after a restart"]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> type[checkpoint_kinds.counter.CheckpointKind]:
    """Let the folder of kinds be two folders."""
    monkeypatch.setattr(checkpoints, "__path__", [*checkpoints.__path__, *checkpoint_kinds.__path__])
    from retain.kv.checkpoints import counter  # type: ignore[attr-defined]

    kind: type[checkpoint_kinds.counter.CheckpointKind] = counter.CheckpointKind
    return kind


def open_engine(family: str, place: str, path: Path) -> Engine:
    tiers = {
        "ram": ["ram:capacity=100MB"],
        "folder": [disk_spec(path)],
        "object store": [f"remote:url=file://{path}/kv,refresh=0.01"],
    }
    return make_engine(
        family, backend="cpu", prefix_cache="exact", tiers=tiers.get(place.removesuffix(" after a restart"), ())
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_go_on_where_the_counter_is(
    counter: type[checkpoint_kinds.counter.CheckpointKind], family: str, place: str, tmp_path: Path
) -> None:
    rng = random.Random(0)
    text = [rng.randrange(128) for _ in range(200)]
    plain = make_engine(family, backend="cpu")
    engine = open_engine(family, place, tmp_path)

    def ask(prompt: list[int]) -> Request:
        request = make_request(prompt, 4)
        assert run_to_completion(engine, [request]) == run_to_completion(plain, [make_request(prompt, 4)])
        return request

    assert ask(text).stats.num_cached_tokens == 0 and not counter.attached
    if place != "pool":
        engine.cache.prefix_cache.tree.evict(engine.cache.prefix_cache.tree.num_evictable_pages)
        offloader_of(engine).sync()
    if place.endswith("restart"):
        engine.cache.prefix_cache.close_offloader()
        engine = open_engine(family, place, tmp_path)
        offloader_of(engine).sync()
    expected = 192  # the whole blocks of the prompt: there it ran on, and left a counter
    for prompt in ([*text, 1, 2, 3], [*text[:192], 5]):
        request = ask(prompt)
        assert request.stats.num_cached_tokens == expected
        assert counter.attached[-1] == (expected, expected)
    assert ask([*text[:100], 7]).stats.num_cached_tokens == 0  # nobody counted there
    engine.cache.prefix_cache.close_offloader()
