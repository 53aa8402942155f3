"""The index of a store on a disk: which spans are published. One process at a time owns a store.

    DIR/lock         locked by the process that uses the store
    DIR/index.db     SQLite: a row for each span, with its keys and a checksum of each of its blocks
    DIR/17.kv        the bytes of span 17; each layer starts at a multiple of 4096

A span is published by inserting its row after its file is complete.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

from retain.kv.stores.checksums import checksum
from retain.kv.stores.span import Span
from retain.kv.stores.store_folder import INDEX_FILES, is_complete, prepare_folder, remove_file, span_file

log = logging.getLogger(__name__)

Json = dict[str, Any]
FORMAT_VERSION = 1
KEY_BYTES = 16
CREATE_TABLE = """
create table if not exists spans (
    number integer primary key, keys blob, rows text, row_bytes integer, begin integer, firsts text, least integer,
    notes integer, packed integer, sums blob, hits integer, used real, made real, checksum integer)
"""
CREATE_FORMATS_TABLE = "create table if not exists formats (fingerprint blob primary key, description text)"


@dataclass(eq=False)
class StoredSpan(Span):
    """A span with its file."""

    file_number: int = 0
    checksums: bytes = b""  # 64 bits for each block of each layer, then 64 bits for the metadata
    created_at: float = 0.0  # seconds since 1970

    @classmethod
    def from_span(cls, span: Span, file_number: int, checksums: bytes) -> StoredSpan:
        """Return the span as it is published: the same pages, in a file of their own."""
        return cls(
            keys=span.keys,
            num_blocks=span.num_blocks,
            block_bytes=span.block_bytes,
            start_page=span.start_page,
            kind=span.kind,
            resumes_from=span.resumes_from,
            metadata_bytes=span.metadata_bytes,
            is_reordered=span.is_reordered,
            hits=span.hits,
            last_used_at=span.last_used_at,
            file_number=file_number,
            checksums=checksums,
            created_at=span.last_used_at,
        )

    @property
    def content_id(self) -> int:
        """Identify the span's bytes in this store."""
        return self.file_number

    @property
    def fixed_columns(self) -> dict[str, Any]:
        """Columns that never change. `row_checksum` covers their values in this order."""
        return {
            "number": self.file_number,
            "keys": b"".join(self.keys),
            "rows": json.dumps(self.num_blocks),
            "row_bytes": self.block_bytes,
            "begin": self.start_page,
            "firsts": self.kind,
            "least": self.resumes_from,
            "notes": self.metadata_bytes,
            "packed": int(self.is_reordered),
            "sums": self.checksums,
        }

    @property
    def row_checksum(self) -> int:
        """Checksum of the fixed columns, as SQLite's signed 64 bits."""
        n = checksum(repr(tuple(self.fixed_columns.values())).encode())
        return n - 2**64 if n >= 2**63 else n


class StoreIndex:
    """The index of the store in a folder, owned by this process until `close`.

    Raises ValueError if another process owns the store, its format differs or the folder must not be used, and OSError
    if it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        prepare_folder(path)
        self.lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"the store {path} is in use by another engine: give each its own") from None
            self.db = _open_database(path)
            self._identity = _identify(path)
        except BaseException:
            os.close(self.lock_fd)
            raise

    def is_in_place(self) -> bool:
        """Whether the folder still has the files that this index has open; without them nothing is found later."""
        try:
            return _identify(self.path) == self._identity
        except OSError:
            return False

    def load_spans(self) -> Iterator[StoredSpan | None]:
        """Yield every published span whose file is complete, the last used first, and None for each damaged one.

        Rows of damaged spans, and files without a row, are removed when the iterator is exhausted.
        """
        complete = set()
        damaged = []
        for row in self.db.execute("select * from spans order by used desc").fetchall():
            number = row["number"]
            span = _span_from_row(row)
            if span and is_complete(span_file(self.path, number), span.size):
                complete.add(span_file(self.path, number))
                yield span
                continue
            damaged.append(number)
            yield None
        self.delete(damaged)
        for file in self.path.iterdir():
            if file.suffix in (".kv", ".tmp") and file not in complete:
                remove_file(file)

    def register_format(self, fingerprint: bytes, description: Json) -> dict[bytes, Json]:
        """Remember what the keys and values of a fingerprint are. Returns all that are known, for diagnoses only."""
        found = {}
        try:
            for name, text in self.db.execute("select * from formats").fetchall():
                if isinstance(known := json.loads(text), dict):
                    found[name] = known
            if found.get(fingerprint) != description:
                found[fingerprint] = description
                with self.db:
                    row = fingerprint, json.dumps(description)
                    self.db.execute("insert or replace into formats values (?, ?)", row)
        except (sqlite3.Error, TypeError, ValueError) as error:
            log.warning("the formats of the store %s cannot be read or written: %s", self.path, error)
        return found

    def add(self, span: StoredSpan, replaces: int | None = None) -> None:
        """Publish a span and, in the same transaction, remove the one whose file number is `replaces`."""
        row = span.fixed_columns | {
            "hits": span.hits,
            "used": span.last_used_at,
            "made": span.created_at,
            "checksum": span.row_checksum,
        }
        values = ", ".join(f":{column}" for column in row)
        with self.db:
            self.db.execute(f"insert into spans ({', '.join(row)}) values ({values})", row)
            self.db.execute("delete from spans where number = ?", (replaces,))
        if replaces is not None:
            remove_file(span_file(self.path, replaces))

    def delete(self, file_numbers: Sequence[int]) -> None:
        """Delete rows, then files: a file without a row is ignored, a row without its file counts as damage."""
        try:
            with self.db:
                self.db.executemany("delete from spans where number = ?", [(n,) for n in file_numbers])
        finally:  # a full disk has room for the rows' changes only after a file is deleted
            for n in file_numbers:
                remove_file(span_file(self.path, n))

    def update_usage(self, spans: Sequence[StoredSpan]) -> None:
        """Save how often and when spans were last used."""
        with self.db:
            rows = [{"hits": s.hits, "used": s.last_used_at, "number": s.file_number} for s in spans]
            self.db.executemany("update spans set hits = :hits, used = :used where number = :number", rows)

    def close(self) -> None:
        """Close the database and release the lock."""
        try:
            self.db.close()
        finally:
            os.close(self.lock_fd)


def list_spans(path: Path) -> list[StoredSpan]:
    """List the published spans of a store, the last used first, even while an engine uses it. Raises OSError."""
    problem = sqlite3.Error()
    # On a disk without room SQLite reads its log only alone, and on one that is read-only only without its log.
    for mode, locking in (("ro", "normal"), ("rw", "exclusive"), ("ro&immutable=1", "normal")):
        uri = f"{path.resolve().as_uri()}/index.db?mode={mode}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=1)) as db:
                db.row_factory = sqlite3.Row
                db.execute(f"pragma locking_mode = {locking}")
                rows = db.execute("select * from spans order by used desc").fetchall()
                return [span for span in map(_span_from_row, rows) if span]
        except sqlite3.Error as error:
            problem = error
    raise OSError(f"the index of the store {path} cannot be read: {problem}")


def find_spans(path: Path) -> list[StoredSpan]:
    """Return the spans whose files can be read in a folder that cannot be written; none without an index."""
    spans: list[StoredSpan] = []
    with suppress(OSError):
        spans = list_spans(path)
    return [span for span in spans if is_complete(span_file(path, span.file_number), span.size)]


def _identify(path: Path) -> list[tuple[int, int]]:
    """Return what the files of an index are, whatever their names are. Raises OSError."""
    found = [os.stat(path / name) for name in ("lock", "index.db")]
    return [(stat.st_dev, stat.st_ino) for stat in found]


def _span_from_row(row: sqlite3.Row) -> StoredSpan | None:
    """Return the span of a row, or None if its checksum does not match."""
    try:
        now = time()
        keys = row["keys"]
        span = StoredSpan(
            keys=tuple(keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)),
            num_blocks=tuple(json.loads(row["rows"])),
            block_bytes=row["row_bytes"],
            start_page=row["begin"],
            kind=row["firsts"],
            resumes_from=row["least"],
            metadata_bytes=row["notes"],
            is_reordered=bool(row["packed"]),
            hits=max(int(row["hits"] or 1), 1),
            last_used_at=min(float(row["used"] or 0), now),
            file_number=row["number"],
            checksums=row["sums"],
            created_at=min(float(row["made"] or 0), now),
        )
        return span if span.row_checksum == row["checksum"] else None
    except (TypeError, ValueError):
        return None


def _open_database(path: Path) -> sqlite3.Connection:
    """Open the index. A missing or corrupt index starts empty."""
    for _ in range(2):
        db = sqlite3.connect(path / "index.db", check_same_thread=False)
        db.row_factory = sqlite3.Row
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
            db.execute(CREATE_FORMATS_TABLE)
            db.execute(f"pragma user_version = {FORMAT_VERSION}")
            return db
        except (ValueError, sqlite3.Error) as error:
            db.close()
            if isinstance(error, ValueError):
                raise
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(f"the index of the store {path} cannot be opened: {error}") from None
            log.warning("the index of the store %s is corrupt and starts empty: %s", path, error)
            for name in INDEX_FILES:
                (path / name).unlink(missing_ok=True)
            prepare_folder(path)
    raise OSError(f"the index of the store {path} cannot be created")
