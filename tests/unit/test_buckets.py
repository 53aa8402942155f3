"""Every place of bytes does the same: memory, folders, object stores."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from retain.kv.stores.bucket import Bucket, Memory
from retain.kv.stores.folder import Folder, LockedFolder
from retain.kv.stores.object_store import ObjectStore
from retain.kv.stores.tiers import parse
from tests.helpers.stored_spans import expected_blocks, key_of, make_span

NAMES = ["00/ab/one", "00/ab/two", "00/cd/one", "01/ab/one"]
PAGE = bytes(range(256)) * 16  # folders write whole pages


@pytest.fixture(params=["memory", "folder", "locked folder", "object store", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param == "s3":
        return ObjectStore("s3://bucket", request.getfixturevalue("s3").url, "x", 5)
    places = {"memory": Memory, "folder": lambda: Folder(tmp_path), "locked folder": lambda: LockedFolder(tmp_path)}
    return places.get(request.param, lambda: ObjectStore("memory:///", None, None, 5))()


def test_objects_are_put_found_listed_and_deleted(bucket: Bucket) -> None:
    for i, name in enumerate(NAMES):
        assert bucket.put(name, (PAGE, memoryview(PAGE * i)))
    for i, name in enumerate(NAMES):
        found = bucket.find(name)
        assert found and (found.name, found.size) == (name, len(PAGE) * (i + 1)) and found.modified_at > 1e9
        assert bucket.get(name, 250, 260).tobytes() == (PAGE * (i + 1))[250:260]
    assert [info.name for info in bucket.list("")] == NAMES
    assert [info.name for info in bucket.list("00")] == NAMES[:3]
    assert [info.name for info in bucket.list("00", NAMES[0])] == NAMES[1:3]
    bucket.delete(NAMES[1])
    bucket.delete(NAMES[1])
    assert bucket.find(NAMES[1]) is None
    with pytest.raises(FileNotFoundError):
        bucket.get(NAMES[1], 0, 10)
    assert [info.name for info in bucket.list("")] == [NAMES[0], *NAMES[2:]]


def test_an_object_is_written_over_only_where_that_is_asked_for(bucket: Bucket) -> None:
    assert bucket.put(NAMES[0], (PAGE,))
    assert not bucket.put(NAMES[0], (PAGE[::-1],))
    assert bucket.get(NAMES[0], 0, len(PAGE)).tobytes() == PAGE
    assert bucket.put(NAMES[0], (PAGE[::-1],), overwrite=True)
    assert bucket.get(NAMES[0], 0, len(PAGE)).tobytes() == PAGE[::-1]


def test_a_range_ends_where_the_object_ends(bucket: Bucket) -> None:
    bucket.put(NAMES[0], (PAGE,))
    assert bucket.get(NAMES[0], 4000, 5000).tobytes() == PAGE[4000:]
    assert bucket.get(NAMES[0], 7, 7).size == 0


def test_a_span_in_memory_can_be_read_after_its_eviction() -> None:
    """It was found, and making room for its load put others in its place."""
    store = parse("ram:capacity=20KiB").open()
    span, data = make_span([1])
    store.put(span, data)
    found, _ = store.find(key_of(1)) or pytest.fail("it is not found")
    store.put(*make_span([2]))
    store.put(*make_span([3]))
    assert store.find(key_of(1)) is None
    with closing(store.open(found)) as reader:
        assert (reader.read_blocks(0, 0, 1) == expected_blocks([1], 0)).all()
