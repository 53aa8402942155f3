"""The disk tier: every published span is found with its bytes, whatever happened, and nothing else is."""

from __future__ import annotations

import logging
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from retain.kv.stores.store import Store
from retain.kv.stores.tiers import parse
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.stored_spans import (
    count_intact,
    expected_blocks,
    key_of,
    make_span,
    names_in,
    open_disk_store,
    read_blocks,
    span_files,
    verify,
)

ROOT = Path(__file__).parents[2]


def test_part_of_a_span_is_read_alone(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    store.put(*make_span(range(9)))
    store.sync()
    assert count_intact(store, 9) == 9
    span, _ = store.find(key_of(4))
    assert (read_blocks(store, span, 2, 2, 7) == expected_blocks([2, 3, 4, 5, 6], 2)).all()
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_many_random_operations_keep_the_bytes_and_the_capacity(evict: str, tmp_path: Path) -> None:
    run_random_operations(evict, tmp_path, num_steps=5000)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_random_operations_keep_the_bytes_and_the_capacity(evict: str, tmp_path: Path) -> None:
    run_random_operations(evict, tmp_path, num_steps=500)


def run_random_operations(evict: str, path: Path, num_steps: int) -> None:
    """Put, find, touch, delete and restart. Every block has the content of its key; the capacity is never exceeded."""
    rng, capacity = random.Random(3), 200_000
    store, ram = open_disk_store(path, "200kB", f",evict={evict}"), parse(f"ram:capacity=200kB,evict={evict}").open()
    for step in range(num_steps):
        i = rng.randrange(300)
        numbers = list(range(i, i + rng.choice([1, 1, 2, 5])))
        if rng.random() < 0.6:
            for each in (store, ram):
                span, data = make_span(numbers)
                if each.accepts(span.size) and not any(map(each.contains, span.keys)):
                    each.put(span, data)
        elif found := store.find(key_of(i)):
            store.touch([found[0]])
            store.sync()  # otherwise it may be evicted before it is read
            count_intact(store, 3)
        if (found := ram.find(key_of(i))) and rng.random() < 0.3:
            ram.delete(found[0])
        if step % 500 == 499:
            store.sync()
            assert count_intact(store, 300) > 0 and count_intact(ram, 300) > 0
            store.close()
            store = open_disk_store(path, "200kB", f",evict={evict}")
        assert store.span_index.used_bytes <= capacity and ram.span_index.used_bytes <= capacity
    store.sync()
    assert sum(f.stat().st_size for f in span_files(path)) == store.span_index.used_bytes
    assert store.counts["damaged"] == store.counts["failed"] == 0
    store.close()


def test_spans_in_use_are_not_evicted(tmp_path: Path) -> None:
    for evict, evicted in (("lru", 1), ("lfu", 2)):
        store = open_disk_store(tmp_path / evict, "49152", f",evict={evict}")  # three spans
        for i in range(3):
            store.put(*make_span([i]))
            store.sync()
        for i in (1, 1, 0, 2):
            store.touch([store.find(key_of(i))[0]])
            time.sleep(0.002)
        for _ in range(5):
            store.touch([store.find(key_of(0))[0]])
        store.put(*make_span([7]))
        store.sync()
        assert [i for i in (0, 1, 2, 7) if not store.find(key_of(i))] == [evicted]
        store.close()


@pytest.mark.slow
def test_restart_after_a_kill_finds_every_published_span_and_nothing_else(tmp_path: Path) -> None:
    rng, most = random.Random(0), 0
    command = [sys.executable, "-m", "tests.helpers.stored_spans", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
        for _ in range(6)  # at once, since importing takes most of their time; each one writes when the last is dead
    ]
    for child in children:
        assert child.stdin and child.stdout
        child.stdin.write(b"write\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.02, 0.3))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        store = open_disk_store(tmp_path, "3MB")
        store.sync()
        assert store.counts["damaged"] == 0 and verify(store) == 0
        most = max(most, count_intact(store, 600))
        assert {f.name for f in span_files(tmp_path)} == names_in(store)
        store.close()
    assert most > 0


def test_drafts_and_damaged_files_are_removed_and_others_left_alone(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    for i in range(4):
        store.put(*make_span([i]))
        store.sync()
    names = [store.find(key_of(i))[0].name for i in range(4)]
    store.close()
    first = tmp_path / names[0]
    first.with_name(f".{first.name}.{'0' * 16}").write_bytes(b"half a file")
    first.with_name("letter").write_bytes(b"of somebody")
    header = bytearray((tmp_path / names[1]).read_bytes())
    header[100] ^= 1
    (tmp_path / names[1]).write_bytes(header)
    (tmp_path / names[2]).write_bytes((tmp_path / names[3]).read_bytes())  # another span's content
    store = open_disk_store(tmp_path)
    store.sync()
    assert store.counts["damaged"] == 2 and count_intact(store, 4) == 2
    assert {f.name for f in span_files(tmp_path)} == names_in(store) | {"letter"}
    store.close()


def test_a_replaced_span_is_deleted_also_after_a_kill(tmp_path: Path) -> None:
    """Of the same tokens in two orders the one of importance counts."""
    store = open_disk_store(tmp_path)
    store.put(*make_span([0, 1]))
    store.sync()
    old, _ = store.find(key_of(0))
    content = (tmp_path / old.name).read_bytes()
    span, data = make_span([0, 1])
    span.is_reordered = True
    store.put(span, data, replaces=old)
    store.sync()
    assert len(span_files(tmp_path)) == 1 and store.find(key_of(0))[0].is_reordered
    store.close()
    (tmp_path / old.name).parent.mkdir(exist_ok=True)
    (tmp_path / old.name).write_bytes(content)  # as if it were killed before it deleted that
    store = open_disk_store(tmp_path)
    store.sync()
    assert store.find(key_of(1))[0].is_reordered and len(span_files(tmp_path)) == 1
    assert store.span_index.used_bytes == span_files(tmp_path)[0].stat().st_size
    store.close()


def test_an_open_reader_goes_on_when_its_span_is_deleted_or_written_anew(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    store.put(*make_span([0, 1]))
    store.sync()
    old, _ = store.find(key_of(0))
    with closing(store.open(old)) as reader:
        store.put(*make_span([0, 1]), replaces=old)
        store.sync()
        assert (reader.read_blocks(0, 0, 2) == expected_blocks([0, 1], 0)).all()
        store.delete(store.find(key_of(0))[0])
        store.sync()
        assert not span_files(tmp_path)
        assert (reader.read_blocks(2, 0, 2) == expected_blocks([0, 1], 2)).all()
    store.close()


def test_a_store_has_one_process(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    with pytest.raises(ValueError, match="in use by another engine"):
        open_disk_store(tmp_path)
    store.close()
    open_disk_store(tmp_path).close()


@pytest.mark.parametrize("name", ["index.db", "17.kv", "a span"])
def test_a_store_of_another_version_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing in it is changed."""
    store = open_disk_store(tmp_path)
    store.put(*make_span([0]))
    store.close()
    if name == "a span":
        (file,) = span_files(tmp_path)
        content = bytearray(file.read_bytes())
        content[8] += 1  # the version
        file.write_bytes(content)
    else:
        (tmp_path / name).write_bytes(b"x")
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(ValueError, match=r"version .*: choose another folder, or remove this one$") as error:
        open_disk_store(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    if name != "a span":
        assert_one_line_error(run_cli(capsys, "cache", "clear", tmp_path), "of version 1")
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before


def test_a_smaller_capacity_keeps_the_last_used_spans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_disk_store(tmp_path)
    for i in range(6):
        store.put(*make_span([i]))
        store.sync()
        time.sleep(0.002)
    store.touch([store.find(key_of(0))[0]])
    store.close()
    caplog.set_level(logging.INFO, "retain.kv.stores")
    store = open_disk_store(tmp_path, "32768")
    store.sync()
    assert names_in(store) == {f.name for f in span_files(tmp_path)}
    assert [i for i in range(6) if store.find(key_of(i))] == [0, 5]
    assert f"tier disk: opened {tmp_path}, 2 spans, 0.0 MiB" in caplog.text
    assert "dropped 0 damaged spans, and 4 beyond the capacity" in caplog.text
    store.close()


def test_failing_writes_are_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when the first write fails, and one with the number of failures when the store is closed.

    Between two attempts nothing is written.
    """

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    store = open_disk_store(tmp_path)
    monkeypatch.setattr(os, "pwritev", fail)
    for i in range(3):
        store.breaker.close()
        store.put(*make_span([i]))
        store.put(*make_span([i]))
        store.sync()
    assert store.counts["failed"] == store.counts["skipped"] == 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot write a span" in warnings[0] and "No space left on device" in warnings[0]
    store.close()
    (last,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING][1:]
    assert "cannot write a span" in last and "3 times" in last


def test_a_store_that_writes_too_slowly_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "max_queued_bytes", 0)
    store = open_disk_store(tmp_path)
    assert not store.accepts(4096) and not store.accepts(4096) and store.counts["skipped"] == 2
    assert [r.levelno for r in caplog.records if "too slow" in r.getMessage()] == [logging.WARNING]
    store.close()


def test_a_replacement_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path, "36864")
    for number in (0, 1):
        store.put(*make_span([number]))
        store.sync()
    old, _ = store.find(key_of(0))
    store.put(*make_span([0], num_layers=9), replaces=old)  # larger than the store
    store.sync()
    assert count_intact(store, 2) == 2 and store.counts["evicted"] == 0
    assert store.span_index.used_bytes <= 36864
    store.put(*make_span([0], num_layers=4), replaces=old)  # it fits in the place of the other
    store.sync()
    assert count_intact(store, 2) == 2 and store.span_index.used_bytes == 36864
    store.close()


def test_a_folder_with_the_name_of_a_span_costs_that_span(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    store.put(*make_span([0]))
    store.sync()
    path = tmp_path / store.find(key_of(0))[0].name
    store.close()
    path.unlink()
    (path / "content").mkdir(parents=True)
    store = open_disk_store(tmp_path)
    for number in range(3):
        store.put(*make_span([number]))
        store.sync()
        store.breaker.close()
    assert count_intact(store, 3) == 2 and (path / "content").is_dir()
    store.close()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lock")
    with pytest.raises(ValueError, match=r"^lock in the store .* is no file"):
        open_disk_store(tmp_path)


def modes_in(path: Path) -> set[str]:
    return {f"{stat.S_IMODE(p.stat().st_mode):o}" for p in path.rglob("*") if p.is_file()}


def test_a_store_that_others_can_read_is_tightened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    store = open_disk_store(path)
    store.put(*make_span([0]))
    store.sync()
    assert modes_in(path) == {"600"} and stat.S_IMODE(path.stat().st_mode) == 0o700
    store.close()
    path.chmod(0o777)
    (path / "lock").chmod(0o644)
    store = open_disk_store(path)
    assert modes_in(path) == {"600"} and stat.S_IMODE(path.stat().st_mode) == 0o700
    assert count_intact(store, 1) == 1 and "mode 777" in caplog.text
    store.close()


def test_a_folder_that_holds_other_files_is_not_tightened_but_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"mode 755.*'thesis\.txt'.*folder of its own"):
        open_disk_store(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755 and os.listdir(tmp_path) == ["thesis.txt"]
    open_disk_store(tmp_path / "retain").close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(ValueError, match="no folder"):
            open_disk_store(path)
    assert os.listdir(tmp_path) == ["file"]
