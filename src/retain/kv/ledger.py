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

from retain.kv.span import Bytes, Span

FORMAT = 1
TABLE = """
create table if not exists spans (
    number integer primary key, keys blob, rows text, row_bytes integer, begin integer, firsts text, least integer,
    notes integer, packed integer, sums blob, hits integer, used real, made real, checksum integer)
"""


@dataclass(eq=False)
class Filed(Span):
    """A span with its file."""

    number: int = 0
    sums: bytes = b""  # 64 bits of each row of each layer
    made: float = 0.0  # seconds since 1970

    @property
    def row(self) -> tuple[Any, ...]:
        """Of the table, but for what changes and the checksum."""
        rows, firsts = json.dumps(self.rows), json.dumps(self.firsts)
        shape = rows, self.row_bytes, self.begin, firsts, self.least, self.notes, int(self.packed)
        return self.number, b"".join(self.keys), *shape, self.sums

    @property
    def checksum(self) -> int:
        """Of the row, as SQLite keeps 64 bits."""
        n = checksum(repr(self.row).encode())
        return n - 2**64 if n >= 2**63 else n


class Ledger:
    """Of the store in a folder, which is this process's until `close`.

    Raises ValueError where it is another's or of another format, OSError where it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"the store {path} is in use by another engine: give each its own") from None
            self.db = _open(path)
        except BaseException:
            os.close(self.lock)
            raise

    def file(self, number: int) -> Path:
        """Of a span."""
        return self.path / f"{number}.kv"

    def spans(self) -> Iterator[Filed | None]:
        """Every span that was published and whose file is there, the last used first; None for one that is not whole.

        What is not whole, and files that nobody knows, are gone when the last one was given.
        """
        whole, lost = set(), []
        for n, *rest in self.db.execute("select * from spans order by used desc").fetchall():
            span = _filed(n, *rest)
            with suppress(OSError):
                if span and self.file(n).stat().st_size == span.size:
                    whole.add(self.file(n))
                    yield span
                    continue
            lost.append(n)
            yield None
        self.forget(lost)
        for file in self.path.iterdir():
            if file.suffix in (".kv", ".tmp") and file not in whole:
                file.unlink(missing_ok=True)

    def add(self, span: Filed, instead: int | None = None) -> None:
        """Publish a span, instead of another."""
        row = (*span.row, span.hits, span.used, span.made, span.checksum)
        with self.db:
            self.db.execute(f"insert into spans values ({','.join('?' * len(row))})", row)
            self.db.execute("delete from spans where number = ?", (instead,))
        if instead is not None:
            self.file(instead).unlink(missing_ok=True)

    def forget(self, numbers: Sequence[int]) -> None:
        """Rows first: a file without a row is nothing; and a row without a file is not whole."""
        try:
            with self.db:
                self.db.executemany("delete from spans where number = ?", [(n,) for n in numbers])
        finally:  # on a full disk there is room for a row only when a file has gone
            for n in numbers:
                self.file(n).unlink(missing_ok=True)

    def remember(self, spans: Sequence[Filed]) -> None:
        """Who was wanted how often, and when."""
        with self.db:
            rows = [(s.hits, s.used, s.number) for s in spans]
            self.db.executemany("update spans set hits = ?, used = ? where number = ?", rows)

    def close(self) -> None:
        """Others may open it."""
        try:
            self.db.close()
        finally:
            os.close(self.lock)


def listed(path: Path) -> list[Filed]:
    """What is published in a store, the last used first, also while somebody uses it. Raises OSError."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}/index.db?mode=ro", uri=True)) as db:
            found = (_filed(*row) for row in db.execute("select * from spans order by used desc").fetchall())
            return [span for span in found if span]
    except sqlite3.Error as error:
        raise OSError(f"the index of the store {path} cannot be read: {error}") from None


def _filed(
    number: int,
    keys: bytes,
    rows: str,
    row_bytes: int,
    begin: int,
    firsts: str,
    least: int,
    notes: int,
    packed: int,
    sums: bytes,
    hits: int,
    used: float,
    made: float,
    checked: int,
) -> Filed | None:
    """A row's span; None where it is not what was written."""
    try:
        names = tuple(keys[i : i + 16] for i in range(0, len(keys), 16))
        shape = tuple(json.loads(rows)), row_bytes, begin, tuple(json.loads(firsts)), least, notes, bool(packed)
        times = (min(float(t or 0), time()) for t in (used, made))
        used, made = times
        span = Filed(names, *shape, max(int(hits or 1), 1), used, number=number, sums=sums, made=made)
        return span if span.checksum == checked else None
    except (TypeError, ValueError):
        return None


def _open(path: Path) -> sqlite3.Connection:
    """The index, empty where there is none or it cannot be read."""
    for _ in range(2):
        db = sqlite3.connect(path / "index.db", check_same_thread=False)
        try:
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = normal")
            found = db.execute("pragma user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise ValueError(f"the store {path} has format {found}, and this is format {FORMAT}: choose another")
            if db.execute("pragma quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check")
            db.execute(TABLE)
            db.execute(f"pragma user_version = {FORMAT}")
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
