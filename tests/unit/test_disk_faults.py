"""A disk tier in a place that cannot be written starts, reads what is there, loses nothing, and stores again later."""

from __future__ import annotations

import logging
import random
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from retain.kv.stores import folder
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.tiers import parse
from retain.kv.stores.tiers.disk import DiskStore
from retain.kv.stores.tiers.remote import RemoteStore
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.disk_faults import FAULTS, Fault, no_room, read_only
from tests.helpers.stored_spans import count_intact, key_of, make_span, names_in, open_disk_store, span_files, verify


def put(store: DiskStore, number: int) -> None:
    """Write a span as the engine does, and wait for it."""
    span, data = make_span([number])
    if store.accepts(span.size):
        store.put(span, data)
    store.sync()


def end_delay(store: DiskStore) -> None:
    """Let the store try its folder again now."""
    store.breaker.close()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("num_spans", [0, 4])
def test_a_place_that_cannot_be_written_is_read_and_written_again_later(
    num_spans: int, fault: Fault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    if num_spans:
        store = open_disk_store(path)
        for number in range(num_spans):
            put(store, number)
        store.close()
    with fault(path):
        store = open_disk_store(path)
        assert count_intact(store, 10) == num_spans
        for number in (7, 8):
            end_delay(store)
            put(store, number)
        kinds = {re.sub(r" \(more.*", "", w) for w in warnings_in(caplog)}
        assert kinds and all("cannot" in w and str(path) in w and "\n" not in w for w in kinds)
        assert len(warnings_in(caplog)) <= 2 and count_intact(store, 10) == num_spans
        end_delay(store)
    put(store, 9)
    assert count_intact(store, 10) == num_spans + 1
    store.close()
    store = open_disk_store(path)
    assert count_intact(store, 10) == num_spans + 1 and store.counts["damaged"] == 0
    store.close()


def test_a_folder_that_vanishes_and_comes_back_is_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, away = tmp_path / "store", tmp_path / "away"
    store = open_disk_store(path)
    put(store, 0)
    path.rename(away)
    path.mkdir()
    (path / "other").write_text("")
    path.chmod(0o755)  # by now it must not be used
    put(store, 1)
    for number in (0, 1):
        if found := store.find(key_of(number)):
            store.delete(found[0])  # as a load that fails does
    end_delay(store)
    put(store, 2)
    assert any("other" in w and "others can read" in w for w in warnings_in(caplog))
    assert [*path.iterdir()] == [path / "other"]
    shutil.rmtree(path)
    away.rename(path)
    end_delay(store)
    put(store, 3)
    assert [number for number in range(4) if store.find(key_of(number))] == [0, 3] and count_intact(store, 4) == 2
    store.close()


def test_a_folder_that_was_removed_is_created_again_on_its_own_file_system_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    store = open_disk_store(path)
    shutil.rmtree(path)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "find_file_system", lambda path: -1)  # it was unmounted
        put(store, 0)
        assert not path.exists()
    end_delay(store)
    put(store, 1)
    assert count_intact(store, 2) == 1
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_faults_that_come_and_go_lose_no_published_span(seed: int, tmp_path: Path) -> None:
    """Whatever was found stays found until it is deleted, with its bytes, over restarts under any fault."""
    rng, path = random.Random(seed), tmp_path / "store"
    store, present, faults = open_disk_store(path), set[int](), ExitStack()
    for step in range(60):
        action = rng.choice(["put", "put", "put", "fault", "heal", "restart"])
        if action == "fault":
            faults.close()
            faults.enter_context(rng.choice([*FAULTS.values()])(path))
        elif action == "heal":
            faults.close()
        elif action == "restart":
            assert count_intact(store, 60) == len(present)
            store.close()
            store = open_disk_store(path)
        elif step not in present:
            put(store, step)
        end_delay(store)
        found = {number for number in range(60) if store.find(key_of(number))}
        assert found >= present and len(found - present) <= 1
        present = found
    faults.close()
    store.close()
    store = open_disk_store(path)
    assert count_intact(store, 60) == len(present) > 5 and verify(store) == store.counts["damaged"] == 0
    assert {f.name for f in span_files(path)} == names_in(store)
    store.close()


def test_a_folder_of_the_remote_tier_that_cannot_be_made_is_a_store_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = parse(f"remote:url=file://{tmp_path / 'store'}")
    with read_only(tmp_path):
        store = tier.open(SpanFormat(b"f" * 16, {}, 1))
        assert isinstance(store, RemoteStore) and len(warnings_in(caplog)) == 1 and not store.accepts(1)
    store.breaker.close()
    store.put(*make_span([0]))
    store.sync()
    assert store.find(key_of(0))
    store.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="no folder"):
        parse(f"remote:url=file://{tmp_path / 'file'}").open(SpanFormat(b"f" * 16, {}, 1))


def test_commands_say_what_they_could_not_remove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store"
    store = open_disk_store(path)
    for number in range(3):
        put(store, number)
    store.close()
    with no_room(tmp_path):
        assert "all intact" in run_cli(capsys, "cache", "verify", path).out
    with read_only(path):
        assert_one_line_error(run_cli(capsys, "cache", "clear", path, "--log-level", "error"), "Read-only file system")
    assert run_cli(capsys, "cache", "clear", path).code == 0 and not span_files(path)


def test_what_could_not_be_deleted_is_deleted_later(tmp_path: Path) -> None:
    """The folder never keeps bytes that its store does not count."""
    path = tmp_path / "store"
    store = open_disk_store(path, str(3 * 16384))
    for number in range(3):
        put(store, number)
    with read_only(path):
        store.delete(store.find(key_of(0))[0])
        put(store, 7)
    end_delay(store)
    put(store, 8)
    assert {f.name for f in span_files(path)} == names_in(store) and count_intact(store, 9) == 3
    store.close()
