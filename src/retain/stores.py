"""`retain cache ls | verify | clear`: what people ask of a store on a disk. What is not known here: models, texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

from retain.kv.ledger import list_spans
from retain.kv.tiers.disk import DiskStore, Tier

AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def ls(path: Path, as_json: bool) -> int:
    """A line for each span, the last used first; also while an engine uses the store."""
    lines = list(_lines(path))
    for line in lines:
        print(json.dumps(line) if as_json else _text(line))
    if not as_json:
        size = sum(line["bytes"] for line in lines)
        print(f"{len(lines)} spans, {size / 2**20:.1f} MiB, wanted {sum(line['hits'] - 1 for line in lines)} times")
    return 0


def verify(path: Path) -> int:
    """Read everything. What is damaged is removed, and the exit code is 1."""
    store = _open(path)
    spans, size = len(store.span_index.spans), store.span_index.used_bytes
    store.verify()
    bad = store.counts["damaged"]
    store.close()
    print(f"{spans} spans, {size / 2**20:.1f} MiB: " + (f"{bad} were damaged, and are removed" if bad else "all whole"))
    return 1 if bad else 0


def clear(path: Path) -> int:
    """Remove everything."""
    store = _open(path)
    print(f"removed {len(store.span_index.spans)} spans, {store.span_index.used_bytes / 2**20:.1f} MiB")
    store.clear()
    store.close()
    if failed := store.counts["failed"]:
        raise OSError(f"{failed} of them could not be removed")
    return 0


def _open(path: Path) -> DiskStore:
    _there(path)
    return Tier(str(path), capacity=2**62).open()


def _there(path: Path) -> None:
    if not (path / "index.db").is_file():
        raise ValueError(f"there is no store at {path}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    _there(path)
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


def _text(line: dict[str, Any]) -> str:
    begin, end = line["first_page"], line["first_page"] + line["pages"]
    pages = f"pages {begin}-{end - 1}" if line["kind"] == "text" else f"windows at {begin}"
    ages = f"made {_ago(line['age_s'])}, used {_ago(line['unused_s'])}"
    return f"{line['span']:>6}  {pages:<18} {line['bytes'] / 2**20:8.1f} MiB  {line['hits']:>5} hits  {ages}"


def _ago(seconds: float) -> str:
    unit, n = next((u for u in AGES if seconds >= u[1]), AGES[-1])
    return f"{seconds / n:.0f} {unit} ago"
