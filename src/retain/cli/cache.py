"""`retain cache ls | verify | clear`: what people ask of a store on a disk. What is not known here: models, texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

from retain.kv.offload.sqlite_index import list_spans
from retain.kv.offload.tiers.disk import DiskStore, Tier

AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def ls(path: Path, as_json: bool) -> int:
    """A line for each span, the last used first; also while an engine uses the store."""
    lines = list(_iter_records(path))
    for line in lines:
        print(json.dumps(line) if as_json else _format_record(line))
    if not as_json:
        size = sum(line["bytes"] for line in lines)
        print(f"{len(lines)} spans, {size / 2**20:.1f} MiB, wanted {sum(line['hits'] - 1 for line in lines)} times")
    return 0


def verify(path: Path) -> int:
    """Read everything. What is damaged is removed, and the exit code is 1."""
    store = _open_store(path)
    spans, size = len(store.span_index.spans), store.span_index.used_bytes
    store.verify()
    bad = store.counts["damaged"]
    store.close()
    print(f"{spans} spans, {size / 2**20:.1f} MiB: " + (f"{bad} were damaged, and are removed" if bad else "all whole"))
    return 1 if bad else 0


def clear(path: Path) -> int:
    """Remove everything."""
    store = _open_store(path)
    print(f"removed {len(store.span_index.spans)} spans, {store.span_index.used_bytes / 2**20:.1f} MiB")
    store.clear()
    store.close()
    if failed := store.counts["failed"]:
        raise OSError(f"{failed} of them could not be removed")
    return 0


def _open_store(path: Path) -> DiskStore:
    _check_store_exists(path)
    return Tier(str(path), capacity=2**62).open()


def _check_store_exists(path: Path) -> None:
    if not (path / "index.db").is_file():
        raise ValueError(f"there is no store at {path}")


def _iter_records(path: Path) -> Iterator[dict[str, Any]]:
    _check_store_exists(path)
    now = time()
    for span in list_spans(path):
        yield {
            "span": span.file_number,
            "kind": "windows" if span.window_starts else "text",
            "first_page": span.start_page,
            "pages": len(span.keys),
            "bytes": span.size,
            "hits": span.hits,
            "age_s": round(now - span.created_at, 1),
            "unused_s": round(now - span.last_used_at, 1),
        }


def _format_record(record: dict[str, Any]) -> str:
    begin, end = record["first_page"], record["first_page"] + record["pages"]
    pages = f"pages {begin}-{end - 1}" if record["kind"] == "text" else f"windows at {begin}"
    ages = f"made {_format_age(record['age_s'])}, used {_format_age(record['unused_s'])}"
    return f"{record['span']:>6}  {pages:<18} {record['bytes'] / 2**20:8.1f} MiB  {record['hits']:>5} hits  {ages}"


def _format_age(seconds: float) -> str:
    unit, n = next((u for u in AGE_UNITS if seconds >= u[1]), AGE_UNITS[-1])
    return f"{seconds / n:.0f} {unit} ago"
