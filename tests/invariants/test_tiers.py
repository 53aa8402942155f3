"""Law 4, further down: what slept in memory or on a disk changes no token, nor does anything that goes wrong there."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from retain.engine.engine import Engine
from retain.kv.offload.tiers.disk import DiskStore
from retain.kv.prefix.attach import attach_pages
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.invariants.test_prefix import asked, disturbed, salted, texts

FAMILIES = ["llama", "mpt", "gemma3_text", "mistral"]


def disk(path: Path, capacity: str = "100MB") -> str:
    return f"disk:path={path},capacity={capacity}"


def restart(engine: Engine) -> None:
    engine.cache.prefix_cache.close_offloader()


def store(engine: Engine) -> DiskStore:
    found = engine.cache.prefix_cache.offloader.stores[-1]
    assert isinstance(found, DiskStore)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", [0, 2])
def test_after_a_restart(family: str, backend: str, seed: int, tmp_path: Path) -> None:
    """One by one; then a new engine finds on the disk what the first has computed."""
    plain = run_to_completion(make_engine(family, backend=backend), asked(family, seed))
    for again in range(3):
        engine = make_engine(family, backend=backend, prefix_cache="exact", tiers=[disk(tmp_path)])
        made = asked(family, seed)
        assert [run_to_completion(engine, [r])[0] for r in made] == plain
        if again:
            assert store(engine).counts["read"] > 0
        assert sum(r.stats.num_cached_tokens for r in made) > (again > 0) * 40
        restart(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("below", ["ram", "disk", "both"])
def test_in_company_and_where_pages_are_short(family: str, below: str, tmp_path: Path) -> None:
    """What the pool gives up sleeps, and comes back; with preemption, cancellation and tiers that are too small."""
    plain = run_to_completion(make_engine(family, backend="cpu"), asked(family, 3, plain=True))
    tiers = {"ram": ["ram:capacity=400kB"], "disk": [disk(tmp_path, "600kB")]}
    tiers["both"] = tiers["ram"] + tiers["disk"]
    pages = 160 if family != "gemma3_text" else 64
    engine = make_engine(
        family,
        backend="cpu",
        prefix_cache="exact",
        num_pages=pages,
        max_running_requests=8,
        max_batched_tokens=64,
        tiers=tiers[below],
    )
    rng = random.Random(5)
    for _ in range(4):
        made = disturbed(engine, family, rng, plain)
    told = engine.cache.prefix_cache.offloader.stats()
    assert all(t["bytes"] <= t["capacity"] for t in told)
    for text in {tuple(r.prompt) for r in made}:
        engine.cache.prefix_cache.tree.evict(engine.cache.prefix_cache.tree.num_evictable_pages)
        if below != "ram":
            store(engine).sync()
        run_to_completion(engine, [make_request(text)])
    assert sum(engine.cache.prefix_cache.offloader.num_loaded_tokens.values()) > 0, told
    restart(engine)


def filled(path: Path, family: str = "llama") -> tuple[list[list[int]], list[list[int]]]:
    """A store that has these texts; and what they give."""
    engine, made = make_engine(family, backend="cpu", prefix_cache="exact", tiers=[disk(path)]), texts(7)
    answers = [run_to_completion(engine, [make_request(t)])[0] for t in made]
    restart(engine)
    return made, answers


def flip(path: Path) -> None:
    for file in path.glob("*.kv"):
        data = bytearray(file.read_bytes())
        data[random.Random(1).randrange(1000)] ^= 4
        file.write_bytes(data)


def cut(path: Path) -> None:
    for file in path.glob("*.kv"):
        os.truncate(file, file.stat().st_size // 2)


def lose(path: Path) -> None:
    for file in path.glob("*.kv"):
        file.unlink()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("harm", [flip, cut, lose])
@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_what_is_damaged_is_computed_again(family: str, harm, when: str, tmp_path: Path) -> None:
    made, answers = filled(tmp_path, family)
    if when == "before":
        harm(tmp_path)
    engine = make_engine(family, backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path)])
    if when != "before":
        harm(tmp_path)
    for r in (requests := [make_request(t) for t in made]):
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert [r.output_tokens for r in requests] == answers
    found = store(engine)
    found.sync()
    assert harm is lose or found.counts["damaged"] > 0
    found.verify()  # nobody has asked for all of it
    assert found.verify() == 0 and len(found.span_index.spans) > 0  # what somebody asked for was stored again
    restart(engine)


@pytest.mark.parametrize("call", ["preadv", "pwritev", "fsync"])
def test_a_disk_that_fails_costs_time_only(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, or broken: what cannot be read is computed, what cannot be written is not kept."""
    made, answers = filled(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path)])
    before = store(engine).span_index.used_bytes

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    others = [[9, *t] for t in made]
    assert [run_to_completion(engine, [make_request(t)])[0] for t in made] == answers
    run_to_completion(engine, [make_request(t) for t in others])
    store(engine).sync()
    if call == "preadv":
        assert all(r.stats.num_cached_tokens == 0 for r in [make_request(made[0])])
    else:
        assert store(engine).counts["failed"] > 0 and store(engine).span_index.used_bytes == before
        assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    run_to_completion(engine, [make_request(t) for t in others])  # it works again
    store(engine).sync()
    assert store(engine).verify() == 0
    restart(engine)


def test_nothing_is_read_for_another_model_salt_or_window(tmp_path: Path) -> None:
    made, _ = filled(tmp_path)
    longest = max(made, key=len)
    for family, salt, policy in (("mpt", "", "full"), ("llama", "x", "full"), ("llama", "", "ring:window=50")):
        engine = make_engine(family, backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path)])
        run_to_completion(engine, [salted(longest, salt, policy)])
        assert store(engine).counts["read"] == 0
        if family == "llama" and not salt:
            run_to_completion(engine, [salted(longest, "")])
            assert store(engine).counts["read"] > 0
        restart(engine)


def test_layers_that_do_not_come_in_time_are_waited_for(tmp_path: Path) -> None:
    """A slow disk, and somebody else who goes on meanwhile; who is preempted or cancelled stops reading."""
    made, answers = filled(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path) + ",read=3MB"])
    assert [run_to_completion(engine, [make_request(t)])[0] for t in made] == answers
    longest = max(made, key=len)
    for end in (engine.scheduler.preempt, engine.cancel):
        engine.cache.prefix_cache.tree.clear()
        r = make_request(longest)
        engine.add(r)
        engine.scheduler.schedule()
        assert engine.cache.prefix_cache.loads
        end(r)
        assert not engine.cache.prefix_cache.loads
        engine.cache.check()
        for _ in iter_steps(engine):
            pass
        assert r.output_tokens in ([], answers[made.index(longest)])
    restart(engine)


def test_where_there_is_no_room_for_what_sleeps_it_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, answers = filled(tmp_path, "gemma3_text")
    engine = make_engine("gemma3_text", backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path)])
    pool, refused = engine.cache.pool, []

    def none(c: object, *rest: object) -> object:
        with pytest.MonkeyPatch.context() as m:
            m.setattr(pool, "room", lambda n: refused.append(n))
            return attach_pages(c, *rest)

    monkeypatch.setattr("retain.kv.prefix.cache.adopt", none)
    assert [run_to_completion(engine, [make_request(t)])[0] for t in made] == answers and refused
    restart(engine)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_whatever_a_reader_meets_costs_nobody_else_anything(error, tmp_path: Path, monkeypatch) -> None:
    made, answers = filled(tmp_path)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", tiers=[disk(tmp_path)])
    monkeypatch.setattr(engine.cache.prefix_cache.offloader, "put", lambda *_: (_ for _ in ()).throw(error))
    for r in (requests := [make_request(t) for t in made]):
        engine.add(r)
    for _ in iter_steps(engine):
        pass
    assert [r.output_tokens for r in requests] == answers
    restart(engine)
