"""Law 4, further down: what slept in memory or on a disk changes no token, nor does anything that goes wrong there."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from retain.engine.loop import Engine
from retain.kv.tiers import Damaged
from retain.kv.tiers.disk import Disk
from tests.laws.test_prefix import asked, salted, texts
from tests.rig import request, rig, run, steps

FAMILIES = ["llama", "mpt", "gemma3_text", "mistral"]


def disk(path: Path, capacity: str = "100MB") -> str:
    return f"disk:path={path},capacity={capacity}"


def restart(engine: Engine) -> None:
    engine.cache.reuse.close()


def store(engine: Engine) -> Disk:
    found = engine.cache.reuse.sleep.stores[-1]
    assert isinstance(found, Disk)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", [0, 2])
def test_after_a_restart(family: str, backend: str, seed: int, tmp_path: Path) -> None:
    """One by one; then a new engine finds on the disk what the first has computed."""
    plain = run(rig(family, backend=backend), asked(family, seed))
    for again in range(3):
        engine = rig(family, backend=backend, prefix="exact", tiers=[disk(tmp_path)])
        made = asked(family, seed)
        assert [run(engine, [r])[0] for r in made] == plain
        if again:
            assert store(engine).counts["read"] > 0
        assert sum(r.cached for r in made) > (again > 0) * 40
        restart(engine)
