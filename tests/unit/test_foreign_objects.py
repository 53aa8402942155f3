"""What is in a remote tier's bucket beside its objects costs itself, and no span."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from retain.kv.stores import catalog, object_store
from retain.kv.stores.bucket import ObjectInfo
from retain.kv.stores.folder import Folder
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.tiers import parse, remote
from retain.kv.stores.tiers.remote import RemoteStore
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.stored_spans import expected_blocks, key_of, make_span

FORMAT = SpanFormat(bytes(range(16)), {}, 4608)
FOLDER = FORMAT.fingerprint.hex()
SPANS = [range(i, i + 3) for i in range(0, 12, 3)]


def open_store(spec: str) -> RemoteStore:
    store = parse(spec).open(FORMAT)
    assert isinstance(store, RemoteStore)
    return store


def fill(spec: str) -> None:
    with closing(open_store(spec)) as store:
        for numbers in SPANS:
            store.put(*make_span(numbers))
        store.sync()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_many(path: Path) -> None:
    path.mkdir()
    for i in range(3000):
        (path / f"{i:032x}").touch()


def make_deep(path: Path) -> None:
    for _ in range(200):
        path.mkdir()
        path /= "d"


KINDS: dict[str, Callable[[Path], None]] = {
    "loop": make_loop,
    "loop through the folder": lambda path: path.symlink_to(path.parent),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "pipe": lambda path: os.mkfifo(path),
    "many": make_many,
    "deep": make_deep,
    "file": lambda path: path.write_bytes(b"x" * 100),
    "folder": lambda path: path.mkdir(),
}
PLACES = ["", f"{FOLDER}/", f"{FOLDER}/ab/"]
NAMES = ["foreign", "ab", "ab" * 16, "00" * 16]


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_file_of_a_folder_costs_no_span(kind: str, tmp_path: Path) -> None:
    """A file, link, pipe or folder with any name, in any place: all spans are found and read, and others written."""
    spec = f"remote:url=file://{tmp_path},refresh=0.01"
    fill(spec)
    (tmp_path / FOLDER / "ab").mkdir(exist_ok=True)
    for place in PLACES:
        for name in NAMES[: 1 if kind == "many" else None]:
            if not (tmp_path / place / name).exists():
                KINDS[kind](tmp_path / place / name)
    with closing(open_store(spec)) as store:
        store.sync()
        store.put(*make_span(range(100, 103)))
        store.sync()
        for numbers in (*SPANS, range(100, 103)):
            found = store.find(key_of(numbers[0]))
            assert found
            with closing(store.open(found[0])) as reader:
                assert (reader.read_blocks(0, 0, 1) == expected_blocks(numbers, 0)[:1]).all()
        assert not store.breaker.is_open and store.accepts(1) and not store.counts["failed"]


def test_a_place_that_is_taken_costs_the_span_that_belongs_there(tmp_path: Path) -> None:
    span, data = make_span(range(3))
    with closing(open_store(f"remote:url=file://{tmp_path},refresh=0.01")) as store:
        store.put(span, data)
        store.sync()
        (name,) = store.catalog.span_of_name
        (tmp_path / name).unlink()
        (tmp_path / name).parent.rmdir()
        make_loop((tmp_path / name).parent)
        store.sync()
        for numbers in (range(3), range(3, 6)):
            store.put(*make_span(numbers))
        store.sync()
        assert not store.find(key_of(0)) and store.find(key_of(3)) and not store.breaker.is_open


def test_a_listing_goes_on_where_its_time_ended(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is a page and then out of time: no page is listed again and again."""
    monkeypatch.setattr(catalog, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(catalog, "LIST_STEP", 50)
    monkeypatch.setattr(object_store, "LIST_CHUNK", 50)
    spec = f"remote:url=s3://bucket,endpoint={s3.url},region=x,refresh=3600"
    fill(spec)
    for i in range(1000):
        s3.put(f"{FOLDER}/{i:03}/foreign", b"x")
    s3.page_size = 50
    s3.requests.clear()
    with closing(open_store(spec)) as store:
        store.sync()
        assert all(store.find(key_of(numbers[0])) for numbers in SPANS)
    pages = [request for request in s3.requests if "list-type" in request]
    assert len(pages) <= 4 * 1004 / 50 and not any(
        "foreign" in request for request in s3.requests if "list-type" not in request
    )


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier knows no less than before, and is left alone for a while."""
    spec = f"remote:url=file://{tmp_path},refresh=0.01"
    fill(spec)

    def fail(path: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    with closing(open_store(spec)) as store:
        store.sync()
        monkeypatch.setattr(os, "scandir", fail)
        with pytest.raises(OSError, match="input/output"):
            list(Folder(tmp_path).list(FOLDER))
        store.sync()
        assert len(store.span_index.spans) == len(SPANS)


def test_an_index_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts a listing has."""
    spec = f"remote:url=file://{tmp_path}"
    fill(spec)
    monkeypatch.setattr(catalog, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(catalog, "LIST_STEP", 1)
    monkeypatch.setattr(remote, "MAX_OBJECTS", len(SPANS) - 1)
    with closing(open_store(spec)) as store:
        store.sync()
        assert len(store.span_index.spans) == len(SPANS) - 1


class FailingFolder(Folder):
    """A folder whose listing fails after each second object."""

    listed: list[str]

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        for i, info in enumerate(super().list(folder, after)):
            if i == 2:
                raise OSError("the connection was reset")
            self.listed.append(info.name)
            yield info


def test_what_a_failed_listing_found_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one goes on after it."""
    fill(f"remote:url=file://{tmp_path}")
    failing = FailingFolder(tmp_path)
    failing.listed = []
    monkeypatch.setattr("retain.kv.stores.tiers.remote.Tier.open_bucket", lambda tier: failing)
    with closing(open_store(f"remote:url=file://{tmp_path},refresh=0.01")) as store:
        store.breaker.first = store.breaker.delay = 0.0
        while len(store.span_index.spans) < len(SPANS):
            store.sync()
        assert failing.listed[: len(SPANS)] == sorted(set(failing.listed))
