"""The index of a store on a disk: which spans are published, and that one process at a time says so.

    DIR/lock         held by the one process that uses the store
    DIR/index.db     SQLite: a row for each span, with its keys and a checksum of every row of pages
    DIR/17.kv        a span's bytes, each layer from a multiple of 4096 on

A span is published by its row, when its file is whole. What is not known here: who writes and reads the files.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from xxhash import xxh3_64_intdigest

from retain.kv.offload.span import Span
from retain.types import Bytes

FORMAT_VERSION = 1
CREATE_TABLE = """
create table if not exists spans (
    number integer primary key, keys blob, rows text, row_bytes integer, begin integer, firsts text, least integer,
    notes integer, packed integer, sums blob, hits integer, used real, made real, checksum integer)
"""


@dataclass(eq=False)
class StoredSpan(Span):
    """A span with its file."""

    file_number: int = 0
    checksums: bytes = b""  # 64 bits of each row of each layer
    created_at: float = 0.0  # seconds since 1970

    @property
    def index_row(self) -> tuple[Any, ...]:
        """Of the table, but for what changes and the checksum."""
        rows, firsts = json.dumps(self.num_blocks), json.dumps(self.window_starts)
        shape = (
            rows,
            self.block_bytes,
            self.start_page,
            firsts,
            self.min_resume_position,
            self.metadata_bytes,
            int(self.is_reordered),
        )
        return self.file_number, b"".join(self.keys), *shape, self.checksums

    @property
    def row_checksum(self) -> int:
        """Of the row, as SQLite keeps 64 bits."""
        n = checksum(repr(self.index_row).encode())
        return n - 2**64 if n >= 2**63 else n


class StoreIndex:
    """Of the store in a folder, which is this process's until `close`.

    Raises ValueError where it is another's or of another format, OSError where it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"the store {path} is in use by another engine: give each its own") from None
            self.db = _open_database(path)
        except BaseException:
            os.close(self.lock_fd)
            raise

    def file_path(self, file_number: int) -> Path:
        """Of a span."""
        return self.path / f"{file_number}.kv"

    def load_spans(self) -> Iterator[StoredSpan | None]:
        """Every span that was published and whose file is there, the last used first; None for one that is not whole.

        What is not whole, and files that nobody knows, are gone when the last one was given.
        """
        whole, lost = set(), []
        for n, *rest in self.db.execute("select * from spans order by used desc").fetchall():
            span = _span_from_row(n, *rest)
            with suppress(OSError):
                if span and self.file_path(n).stat().st_size == span.size:
                    whole.add(self.file_path(n))
                    yield span
                    continue
            lost.append(n)
            yield None
        self.delete(lost)
        for file in self.path.iterdir():
            if file.suffix in (".kv", ".tmp") and file not in whole:
                file.unlink(missing_ok=True)

    def add(self, span: StoredSpan, replaces: int | None = None) -> None:
        """Publish a span, instead of another."""
        row = (*span.index_row, span.hits, span.last_used_at, span.created_at, span.row_checksum)
        with self.db:
            self.db.execute(f"insert into spans values ({','.join('?' * len(row))})", row)
            self.db.execute("delete from spans where number = ?", (replaces,))
        if replaces is not None:
            self.file_path(replaces).unlink(missing_ok=True)

    def delete(self, file_numbers: Sequence[int]) -> None:
        """Rows first: a file without a row is nothing; and a row without a file is not whole."""
        try:
            with self.db:
                self.db.executemany("delete from spans where number = ?", [(n,) for n in file_numbers])
        finally:  # on a full disk there is room for a row only when a file has gone
            for n in file_numbers:
                self.file_path(n).unlink(missing_ok=True)

    def update_usage(self, spans: Sequence[StoredSpan]) -> None:
        """Who was wanted how often, and when."""
        with self.db:
            rows = [(s.hits, s.last_used_at, s.file_number) for s in spans]
            self.db.executemany("update spans set hits = ?, used = ? where number = ?", rows)

    def close(self) -> None:
        """Others may open it."""
        try:
            self.db.close()
        finally:
            os.close(self.lock_fd)


def list_spans(path: Path) -> list[StoredSpan]:
    """What is published in a store, the last used first, also while somebody uses it. Raises OSError."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}/index.db?mode=ro", uri=True)) as db:
            found = (_span_from_row(*row) for row in db.execute("select * from spans order by used desc").fetchall())
            return [span for span in found if span]
    except sqlite3.Error as error:
        raise OSError(f"the index of the store {path} cannot be read: {error}") from None


def _span_from_row(
    file_number: int,
    keys: bytes,
    num_blocks: str,
    block_bytes: int,
    start_page: int,
    window_starts: str,
    min_resume_position: int,
    metadata_bytes: int,
    is_reordered: int,
    checksums: bytes,
    hits: int,
    last_used_at: float,
    created_at: float,
    row_checksum: int,
) -> StoredSpan | None:
    """A row's span; None where it is not what was written."""
    try:
        names = tuple(keys[i : i + 16] for i in range(0, len(keys), 16))
        shape = (
            tuple(json.loads(num_blocks)),
            block_bytes,
            start_page,
            tuple(json.loads(window_starts)),
            min_resume_position,
            metadata_bytes,
            bool(is_reordered),
        )
        times = (min(float(t or 0), time()) for t in (last_used_at, created_at))
        last_used_at, created_at = times
        span = StoredSpan(
            names,
            *shape,
            max(int(hits or 1), 1),
            last_used_at,
            file_number=file_number,
            checksums=checksums,
            created_at=created_at,
        )
        return span if span.row_checksum == row_checksum else None
    except (TypeError, ValueError):
        return None


def _open_database(path: Path) -> sqlite3.Connection:
    """The index, empty where there is none or it cannot be read."""
    for _ in range(2):
        db = sqlite3.connect(path / "index.db", check_same_thread=False)
        try:
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = normal")
            found = db.execute("pragma user_version").fetchone()[0]
            if found not in (0, FORMAT_VERSION):
                raise ValueError(
                    f"the store {path} has format {found}, and this is format {FORMAT_VERSION}: choose another"
                )
            if db.execute("pragma quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check")
            db.execute(CREATE_TABLE)
            db.execute(f"pragma user_version = {FORMAT_VERSION}")
            return db
        except (ValueError, sqlite3.Error) as error:
            db.close()
            if isinstance(error, ValueError):
                raise
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(f"the index of the store {path} cannot be opened: {error}") from None
            for name in ("index.db", "index.db-wal", "index.db-shm"):
                (path / name).unlink(missing_ok=True)
    raise OSError(f"the index of the store {path} cannot be made")


def checksum(data: bytes | Bytes) -> int:
    """64 bits of it."""
    return xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)
