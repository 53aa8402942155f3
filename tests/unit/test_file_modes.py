"""Whatever umask a process has, what it writes for itself can be entered and read by its owner only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from retain.cluster import launch
from retain.files import atomic_write, get_cache_dir
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.tiers import parse
from tests.helpers.file_modes import open_to_others
from tests.helpers.stored_spans import make_span


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """A process that gives every file to everybody, unless it says otherwise."""
    previous = os.umask(0)
    yield
    os.umask(previous)


@pytest.mark.parametrize("tier", ["disk:path={},capacity=1GiB", "remote:url=file://{}"])
def test_stores_are_closed_to_others(tier: str, tmp_path: Path) -> None:
    with closing(parse(tier.format(tmp_path / "new" / "store")).open(SpanFormat(b"f" * 16, {}, 4608))) as store:
        store.put(*make_span(range(3)))
        store.sync()
        assert any(path.is_file() for path in tmp_path.rglob("*")) and not open_to_others(tmp_path)
    assert not open_to_others(tmp_path)


def test_cached_files_and_locks_are_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETAIN_CACHE", str(tmp_path / "new" / "cache"))
    replica = pytest.importorskip("retain.cluster.replica")
    atomic_write(get_cache_dir() / "tokenizers" / "one", lambda file: file.write(b"x"))
    _, lock = replica.claim_index(get_cache_dir() / "replicas" / "one")
    lock.close()
    assert not open_to_others(tmp_path)


def test_the_folder_of_ray_is_closed_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray gives everybody its own folder, with the sockets of its processes."""
    ray = pytest.importorskip("ray")

    def init(**options: object) -> None:
        folder = Path(os.environ["RAY_TMPDIR"]) / "ray"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        (folder / "socket").touch()

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with launch._ray():
        assert list(tmp_path.rglob("socket")) and not open_to_others(tmp_path)
