"""A question about prefixes is asked once for each admission of a request, whatever may answer it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.radix_tree import RadixTree
from tests.helpers.engines import iter_steps, make_engine, make_request
from tests.helpers.marks import slow
from tests.helpers.tiers import disk_spec


@pytest.mark.parametrize("num_pages", [4000, 400])
@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama")])
@pytest.mark.parametrize("policy", ["full", "h2o:budget=50%", *slow("sinks:budget=40,prefill=stream,chunk=24")])
def test_each_admission_asks_once(
    family: str, policy: str, num_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tier, in a pool that preempts: one look-up in the tree, and one question of the cache, for each."""
    counts = dict.fromkeys(("find", "match_prefix", "attach", "refused"), 0)

    def count(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def counted(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return method(*args, **more)

        monkeypatch.setattr(cls, name, counted)

    for cls, name in ((PrefixCache, "find"), (RadixTree, "match_prefix"), (PrefixCache, "attach")):
        count(cls, name)
    rng = random.Random(0)
    engine = make_engine(family, backend="cpu", prefix_cache="exact", num_pages=num_pages, tiers=[disk_spec(tmp_path)])
    find_start = engine.scheduler._find_start

    def count_refused(request: Any) -> Any:
        before = counts["find"]
        found = find_start(request)
        counts["refused"] += found is None and counts["find"] > before
        return found

    engine.scheduler._find_start = count_refused  # type: ignore[method-assign]
    stem = [rng.randrange(128) for _ in range(120)]
    for _ in range(3):
        texts = [[*stem[: rng.randrange(20, 120)], *(rng.randrange(128) for _ in range(30))] for _ in range(4)]
        engine.add(*(make_request(text, 20, policy) for text in texts))
        for _ in iter_steps(engine):
            pass
    assert counts["attach"] >= 12
    assert counts["find"] == counts["match_prefix"] == counts["attach"] + counts["refused"]
    engine.cache.prefix_cache.close_offloader()
