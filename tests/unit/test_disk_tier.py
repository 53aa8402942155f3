"""The disk tier: every published span is found with its bytes, whatever happened, and nothing else is."""

from __future__ import annotations

import logging
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from retain.kv.stores.sqlite_index import StoredSpan, list_spans
from retain.kv.stores.tiers import disk, parse
from tests.helpers.stored_spans import count_intact, expected_blocks, key_of, make_span, open_disk_store, read_blocks

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
    assert sum(f.stat().st_size for f in path.glob("*.kv")) == store.span_index.used_bytes
    assert store.counts["damaged"] == store.counts["failed"] == 0
    store.close()


def test_spans_in_use_are_not_evicted(tmp_path: Path) -> None:
    for evict, evicted in (("lru", 1), ("lfu", 2)):
        store = open_disk_store(tmp_path / evict, "36864", f",evict={evict}")  # three spans
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
        assert store.counts["damaged"] == 0 and store.verify() == 0
        most = max(most, count_intact(store, 600))
        assert {f.name for f in tmp_path.glob("*.[kt]*")} == {f"{s.file_number}.kv" for s in store.span_index}
        store.close()
    assert most > 0


def test_files_without_a_row_are_removed(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    store.put(*make_span([0]))
    store.close()
    (tmp_path / "9.tmp").write_bytes(b"half a file")
    (tmp_path / "8.kv").write_bytes(b"a file without a row")
    store = open_disk_store(tmp_path)
    assert count_intact(store, 3) == 1 and len(list(tmp_path.glob("*.[kt]*"))) == 1
    store.close()


def test_changed_rows_of_the_index_are_not_trusted(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    for i in range(4):
        store.put(*make_span([i]))
    store.close()
    db = sqlite3.connect(tmp_path / "index.db")
    db.execute("update spans set keys = ? where number = 2", (key_of(17),))
    db.execute("update spans set rows = '[9, 9]' where number = 3")
    db.commit()
    db.close()
    store = open_disk_store(tmp_path)
    assert store.counts["damaged"] == 2 and not store.find(key_of(17))
    assert count_intact(store, 4) == 2
    store.close()
    for garbage in (b"this is no database" * 300, b""):
        (tmp_path / "index.db").write_bytes(garbage)
        store = open_disk_store(tmp_path)
        assert count_intact(store, 4) == 0
        store.put(*make_span([5]))
        store.sync()
        assert count_intact(store, 6) == 1
        store.close()


def test_index_columns_are_read_by_name(tmp_path: Path) -> None:
    """A later version may add columns; the spans are still found."""
    store = open_disk_store(tmp_path)
    store.put(*make_span([0, 1]))
    store.close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        db.execute("alter table spans add column comment text")
        db.commit()
    assert [len(span.keys) for span in list_spans(tmp_path)] == [2]
    store = open_disk_store(tmp_path)
    assert count_intact(store, 2) == 2 and store.counts["damaged"] == 0
    store.put(*make_span([5]))
    store.close()
    assert [len(span.keys) for span in list_spans(tmp_path)] == [1, 2]


def test_format_of_the_index_is_stable(tmp_path: Path) -> None:
    """Names and order of the columns, and the checksum of a row, as format 1 has always had them."""
    open_disk_store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        columns = [name for _, name, *_ in db.execute("pragma table_info(spans)")]
    assert " ".join(columns) == (
        "number keys rows row_bytes begin firsts least notes packed sums hits used made checksum"
    )
    span = StoredSpan(
        keys=(b"k" * 16, b"l" * 16),
        num_blocks=(2, 2, 3),
        block_bytes=1536,
        start_page=7,
        window_starts=(4, 5),
        min_resume_position=96,
        metadata_bytes=4096,
        is_reordered=True,
        file_number=9,
        checksums=b"\1" * 64,
    )
    assert span.row_checksum == 5814753509197113999
    span = StoredSpan(keys=(b"k" * 16,), num_blocks=(1,), block_bytes=1536, file_number=1, checksums=b"\1" * 8)
    assert span.row_checksum == 7104303425395954811


def test_a_store_has_one_process_and_one_format(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path)
    with pytest.raises(ValueError, match="in use by another engine"):
        open_disk_store(tmp_path)
    store.close()
    open_disk_store(tmp_path).close()
    db = sqlite3.connect(tmp_path / "index.db")
    db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(ValueError, match="format 99"):
        open_disk_store(tmp_path)


def test_a_smaller_capacity_keeps_the_last_used_spans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_disk_store(tmp_path)
    for i in range(6):
        store.put(*make_span([i]))
        store.sync()
        time.sleep(0.002)
    store.touch([store.find(key_of(0))[0]])
    store.close()
    caplog.set_level(logging.INFO, "retain.kv.stores")
    store = open_disk_store(tmp_path, "24576")
    assert [i for i in range(6) if store.find(key_of(i))] == [0, 5]
    assert f"tier disk: opened {tmp_path}, 2 spans, 0.0 MiB" in caplog.text
    assert "dropped 0 damaged spans, and 4 beyond the capacity" in caplog.text
    store.close()


def test_failing_writes_are_logged_once_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning when the first write fails, and one with the number of failures when the store is closed."""

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    store = open_disk_store(tmp_path)
    monkeypatch.setattr(os, "pwritev", fail)
    for i in range(3):
        store.put(*make_span([i]))
    store.sync()
    assert store.counts["failed"] == 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot write a span" in warnings[0] and "No space left on device" in warnings[0]
    store.close()
    (last,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING][1:]
    assert "cannot write a span" in last and "3 times" in last


def test_a_store_that_writes_too_slowly_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "MAX_QUEUED_BYTES", 0)
    store = open_disk_store(tmp_path)
    assert not store.accepts(4096) and not store.accepts(4096) and store.counts["skipped"] == 2
    assert [r.levelno for r in caplog.records if "too slow" in r.getMessage()] == [logging.WARNING]
    store.close()


def test_a_replacement_that_cannot_fit_evicts_nothing(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path, "32768")
    for number in (0, 1):
        store.put(*make_span([number]))
        store.sync()
    old, _ = store.find(key_of(0))
    store.put(
        *make_span([0, 2, 3, 4, 5, 6, 7, 8]), replaces=old
    )  # larger than the store, without the bytes that it replaces
    store.sync()
    assert count_intact(store, 9) == 2 and store.counts["evicted"] == 0
    assert store.span_index.used_bytes <= 32768
    store.put(*make_span([0, 2]), replaces=old)
    store.sync()
    assert count_intact(store, 6) == 3 and store.span_index.used_bytes == 24576
    store.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tape", "choose one of disk, ram"),
        ("ram", "needs capacity"),
        ("disk:path=x", "needs capacity"),
        ("ram:capacity=lots", "not a size"),
        ("ram:capacity=1GB,evict=fifo", "evict is lru, lfu or importance"),
        ("disk:path=x,capacity=1GB,evict=importance", "evict is lru or lfu"),
        ("ram:capacity=1GB,path=x", "no option 'path'"),
    ],
)
def test_bad_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize("name", ["1.kv", "9.kv", "9.tmp"])
def test_folders_named_like_spans_are_ignored(tmp_path: Path, name: str) -> None:
    store = open_disk_store(tmp_path)
    store.put(*make_span([0]))
    store.close()
    (tmp_path / name).unlink(missing_ok=True)  # 1.kv: the index has a row for it
    (tmp_path / name / "content").mkdir(parents=True)
    store = open_disk_store(tmp_path)
    for number in range(3):
        store.put(*make_span([number]))
        store.sync()
    assert count_intact(store, 3) >= 2 and (tmp_path / name / "content").is_dir()
    store.close()


@pytest.mark.parametrize("name", ["index.db", "index.db-wal", "lock"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_an_index_that_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"^{name} in the store .* is no file"):
        open_disk_store(tmp_path)


def modes_in(path: Path) -> set[str]:
    return {f"{stat.S_IMODE(p.stat().st_mode):o}" for p in path.iterdir()}


def test_a_store_that_others_can_read_is_tightened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    store = open_disk_store(path)
    store.put(*make_span([0]))
    store.sync()
    assert modes_in(path) == {"600"} and stat.S_IMODE(path.stat().st_mode) == 0o700
    store.close()
    path.chmod(0o777)
    (path / "index.db").chmod(0o644)
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
