"""The store on a disk: what was published is there and whole, whatever happened; nothing else is."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from retain.kv.offload.span import Span, alloc_aligned
from retain.kv.offload.sqlite_index import StoredSpan, list_spans
from retain.kv.offload.tiers import parse
from retain.kv.offload.tiers.disk import DiskStore
from retain.kv.offload.tiers.ram import RamStore

ROW = 1536


def opened(path: Path, capacity: str = "1GB", more: str = "") -> DiskStore:
    store = parse(f"disk:path={path},capacity={capacity}{more}").open()
    assert isinstance(store, DiskStore)
    return store


def key(i: int) -> bytes:
    return blake2b(str(i).encode(), digest_size=16).digest()


def span_of(numbers: list[int], layers: int = 3) -> tuple[Span, np.ndarray]:
    """Its content follows from its keys."""
    span = Span(tuple(map(key, numbers)), (len(numbers),) * layers, ROW)
    data = alloc_aligned(span.size)
    for layer in range(layers):
        span.view_layer(data, layer)[:] = content(numbers, layer)
    return span, data


def content(numbers: list[int], layer: int) -> np.ndarray:
    return np.stack([np.random.default_rng((n, layer)).integers(0, 256, ROW, np.uint8) for n in numbers])


def read(store: DiskStore | RamStore, span: Span, layer: int, begin: int, end: int) -> np.ndarray:
    with closing(store.open(span)) as reader:
        return reader.read_blocks(layer, begin, end)


def check(store: DiskStore | RamStore, n: int) -> int:
    """All that is there of the first n numbers must be right. How many are."""
    there = 0
    for i in range(n):
        if found := store.find(key(i)):
            span, at = found
            there += 1
            for layer in range(len(span.num_blocks)):
                assert (read(store, span, layer, at, at + 1) == content([i], layer)).all()
    return there


def test_a_part_of_a_span_is_read_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(*span_of(list(range(9))))
    store.sync()
    assert check(store, 9) == 9
    span, _ = store.find(key(4))
    assert (read(store, span, 2, 2, 7) == content([2, 3, 4, 5, 6], 2)).all()
    store.close()


@pytest.mark.parametrize("by", ["lru", "lfu"])
def test_random_operations(by: str, tmp_path: Path) -> None:
    """Keep, find, want, drop, restart, against what their keys say; never more bytes than allowed."""
    rng, capacity = random.Random(3), 200_000
    store, ram = opened(tmp_path, "200kB", f",evict={by}"), parse(f"ram:capacity=200kB,evict={by}").open()
    for step in range(5000):
        i = rng.randrange(300)
        numbers = list(range(i, i + rng.choice([1, 1, 2, 5])))
        if rng.random() < 0.6:
            for each in (store, ram):
                span, data = span_of(numbers)
                if each.accepts(span.size) and not any(map(each.contains, span.keys)):
                    each.put(span, data)
        elif found := store.find(key(i)):
            store.touch([found[0]])
            store.sync()  # or it may be evicted before it is read
            check(store, 3)
        if (found := ram.find(key(i))) and rng.random() < 0.3:
            ram.delete(found[0])
        if step % 500 == 499:
            store.sync()
            assert check(store, 300) > 0 and check(ram, 300) > 0
            store.close()
            store = opened(tmp_path, "200kB", f",evict={by}")
        assert store.span_index.used_bytes <= capacity and ram.span_index.used_bytes <= capacity
    store.sync()
    assert sum(f.stat().st_size for f in tmp_path.glob("*.kv")) == store.span_index.used_bytes
    assert store.counts["damaged"] == store.counts["failed"] == 0
    store.close()


def test_who_is_used_stays(tmp_path: Path) -> None:
    for by, gone in (("lru", 1), ("lfu", 2)):
        store = opened(tmp_path / by, "36864", f",evict={by}")  # three spans
        for i in range(3):
            store.put(*span_of([i]))
            store.sync()
        for i in (1, 1, 0, 2):
            store.touch([store.find(key(i))[0]])
            time.sleep(0.002)
        for _ in range(5):
            store.touch([store.find(key(0))[0]])
        store.put(*span_of([7]))
        store.sync()
        assert [i for i in (0, 1, 2, 7) if not store.find(key(i))] == [gone]
        store.close()


WRITER = """
import sys
sys.path[:0] = {path!r}
from tests.unit.test_disk_tier import opened, span_of
from pathlib import Path
store = opened(Path({store!r}), "3MB")
print("ready", flush=True)
for i in range(100000):
    store.put(*span_of(list(range(3 * i, 3 * i + 3))))
    if i % 20 == 0:
        store.sync()
"""


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """A restart finds every published span intact, and nothing else."""
    code = WRITER.format(path=[str(Path(__file__).parents[2])], store=str(tmp_path))
    rng, most = random.Random(0), 0
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.02, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        store = opened(tmp_path, "3MB")
        assert store.counts["damaged"] == 0 and store.verify() == 0
        most = max(most, check(store, 600))
        assert {f.name for f in tmp_path.glob("*.[kt]*")} == {f"{s.file_number}.kv" for s in store.span_index}
        store.close()
    assert most > 0


def test_what_lies_about_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(*span_of([0]))
    store.close()
    (tmp_path / "9.tmp").write_bytes(b"half")
    (tmp_path / "8.kv").write_bytes(b"nobody knows it")
    store = opened(tmp_path)
    assert check(store, 3) == 1 and len(list(tmp_path.glob("*.[kt]*"))) == 1
    store.close()


def test_an_index_that_lies_is_not_believed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(4):
        store.put(*span_of([i]))
    store.close()
    db = sqlite3.connect(tmp_path / "index.db")
    db.execute("update spans set keys = ? where number = 2", (key(17),))
    db.execute("update spans set rows = '[9, 9]' where number = 3")
    db.commit()
    db.close()
    store = opened(tmp_path)
    assert store.counts["damaged"] == 2 and not store.find(key(17))
    assert check(store, 4) == 2
    store.close()
    for garbage in (b"this is no database" * 300, b""):
        (tmp_path / "index.db").write_bytes(garbage)
        store = opened(tmp_path)
        assert check(store, 4) == 0
        store.put(*span_of([5]))
        store.sync()
        assert check(store, 6) == 1
        store.close()


def test_one_engine_at_a_time_and_one_format(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(ValueError, match="in use by another engine"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()
    db = sqlite3.connect(tmp_path / "index.db")
    db.execute("pragma user_version = 99")
    db.close()
    with pytest.raises(ValueError, match="format 99"):
        opened(tmp_path)


def test_a_smaller_capacity_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(6):
        store.put(*span_of([i]))
        store.sync()
        time.sleep(0.002)
    store.touch([store.find(key(0))[0]])
    store.close()
    store = opened(tmp_path, "24576")
    assert [i for i in range(6) if store.find(key(i))] == [0, 5]
    store.close()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tape", "choose one of disk, ram"),
        ("ram", "needs capacity"),
        ("disk:path=x", "needs capacity"),
        ("ram:capacity=lots", "not a size"),
        ("ram:capacity=1GB,evict=fifo", "evict is lru, lfu or worth"),
        ("disk:path=x,capacity=1GB,evict=worth", "evict is lru or lfu"),
        ("ram:capacity=1GB,path=x", "no option 'path'"),
    ],
)
def test_bad_options(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        opened(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


def test_index_columns_are_read_by_name(tmp_path: Path) -> None:
    """A later version may add columns; the spans are still found."""
    store = opened(tmp_path)
    store.put(*span_of([0, 1]))
    store.close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        db.execute("alter table spans add column comment text")
        db.commit()
    assert [len(span.keys) for span in list_spans(tmp_path)] == [2]
    store = opened(tmp_path)
    assert check(store, 2) == 2 and store.counts["damaged"] == 0
    store.put(*span_of([5]))
    store.close()
    assert [len(span.keys) for span in list_spans(tmp_path)] == [1, 2]


def test_format_of_the_index_is_stable(tmp_path: Path) -> None:
    """Names and order of the columns, and the checksum of a row, as format 1 has always had them."""
    opened(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "index.db")) as db:
        columns = [name for _, name, *_ in db.execute("pragma table_info(spans)")]
    assert " ".join(columns) == (
        "number keys rows row_bytes begin firsts least notes packed sums hits used made checksum"
    )
    shape = {"num_blocks": (2, 2, 3), "block_bytes": 1536, "start_page": 7, "window_starts": (4, 5)}
    span = StoredSpan(
        keys=(b"k" * 16, b"l" * 16),
        **shape,
        min_resume_position=96,
        metadata_bytes=4096,
        is_reordered=True,
        file_number=9,
        checksums=b"\1" * 64,
    )
    assert span.row_checksum == 5814753509197113999
    span = StoredSpan(keys=(b"k" * 16,), num_blocks=(1,), block_bytes=1536, file_number=1, checksums=b"\1" * 8)
    assert span.row_checksum == 7104303425395954811
