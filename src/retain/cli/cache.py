"""`retain cache ls | verify | clear | sweep | why`: look after the store of a tier, and explain prefix misses."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

from retain.kv.stores import tiers
from retain.kv.stores.remote import maintenance
from retain.kv.stores.span import Span
from retain.kv.stores.sqlite_index import list_spans
from retain.kv.stores.tiers import disk, remote
from retain.plugins import needs_extra

AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
UNLIMITED = 2**62  # bytes


def cache(args: Namespace) -> int:
    """List, verify, clear or sweep a store, or explain what a cache would have of recorded requests."""
    if args.action == "why":
        return _explain_files(args)
    if ":" in args.path and args.action != "clear":
        return _manage_bucket(args)
    if args.action == "sweep":
        raise ValueError("a store on a disk has a capacity, and sweeps itself: sweep is for remote:url=...")
    path = Path(args.path)
    if args.action == "ls":
        return list_store(path, args.json)
    return verify_store(path) if args.action == "verify" else clear_store(path)


def _manage_bucket(args: Namespace) -> int:
    tier = tiers.parse(args.path)
    if not isinstance(tier, remote.Tier):
        raise ValueError(
            f"{args.path!r} is no remote tier: give remote:url=s3://BUCKET/FOLDER, or a disk tier's folder"
        )
    if args.action == "ls":
        return list_bucket(tier, args.json)
    return verify_bucket(tier) if args.action == "verify" else sweep_bucket(tier, args.max_bytes, args.max_age)


def _explain_files(args: Namespace) -> int:
    if not hasattr(args, "model"):
        raise ValueError("--model is missing: the tokenizer and the chat template of a model encode the requests")
    with needs_extra("reading requests", "serve"):
        from retain.cli.cache_why import explain_files
    return explain_files(args)


def list_store(path: Path, as_json: bool) -> int:
    """Print a line for each span, the last used first; also while an engine uses the store."""
    records = list(_iter_records(path))
    for record in records:
        print(json.dumps(record) if as_json else _format_record(record))
    if not as_json:
        size = sum(r["bytes"] for r in records)
        hits = sum(r["hits"] for r in records)
        print(f"{len(records)} spans, {size / 2**20:.1f} MiB, hit {hits - len(records)} times")
    return 0


def verify_store(path: Path) -> int:
    """Read every span and remove the damaged ones. The exit code is 1 where there were any. Raises OSError."""
    store = _open_store(path)
    num_spans = len(store.span_index.spans)
    size = store.span_index.used_bytes
    store.verify()
    damaged = store.counts["damaged"]
    store.close()
    _check_removed(store)
    result = f"{damaged} were damaged, and are removed" if damaged else "all intact"
    print(f"{num_spans} spans, {size / 2**20:.1f} MiB: {result}")
    return 1 if damaged else 0


def clear_store(path: Path) -> int:
    """Remove every span. Raises OSError where a file cannot be removed."""
    store = _open_store(path)
    num_spans = len(store.span_index.spans)
    size = store.span_index.used_bytes
    store.clear()
    store.close()
    _check_removed(store)
    print(f"removed {num_spans} spans, {size / 2**20:.1f} MiB")
    return 0


def _check_removed(store: disk.DiskStore) -> None:
    if failed := store.counts["failed"] + store.counts["skipped"]:
        raise OSError(f"{failed} of them could not be removed")


def _open_store(path: Path) -> disk.DiskStore:
    _check_store_exists(path)
    return disk.Tier(str(path), capacity=UNLIMITED).open()


def _check_store_exists(path: Path) -> None:
    if not (path / "index.db").is_file():
        raise ValueError(f"there is no store at {path}")


def _iter_records(path: Path) -> Iterator[dict[str, Any]]:
    _check_store_exists(path)
    now = time()
    for span in list_spans(path):
        yield {
            "span": span.file_number,
            **_describe(span),
            "bytes": span.size,
            "hits": span.hits,
            "age_s": round(now - span.created_at, 1),
            "idle_s": round(now - span.last_used_at, 1),
        }


def _format_record(record: dict[str, Any]) -> str:
    pages = _format_place(record)
    ages = f"made {_format_age(record['age_s'])}, used {_format_age(record['idle_s'])}"
    return f"{record['span']:>6}  {pages:<18} {record['bytes'] / 2**20:8.1f} MiB  {record['hits']:>5} hits  {ages}"


def _describe(span: Span) -> dict[str, Any]:
    """Say what a span has: pages of a text, or a checkpoint, from which texts go on after `position` tokens."""
    if span.kind != "text":
        return {"kind": span.kind, "position": span.resumes_from}
    return {"kind": span.kind, "first_page": span.start_page, "pages": len(span.keys)}


def _format_place(record: dict[str, Any]) -> str:
    if record["kind"] != "text":
        return f"{record['kind']} from {record['position']}"
    begin = record["first_page"]
    return f"pages {begin}-{begin + record['pages'] - 1}"


def _format_age(seconds: float) -> str:
    unit, unit_seconds = next((u for u in AGE_UNITS if seconds >= u[1]), AGE_UNITS[-1])
    return f"{seconds / unit_seconds:.0f} {unit} ago"


def list_bucket(tier: remote.Tier, as_json: bool) -> int:
    """Print a line for each object."""
    count = 0
    size = 0
    now = time()
    for info, span in maintenance.iter_spans(tier.open_bucket()):
        count = count + 1
        size = size + info.size
        record = {"object": info.name, "kind": "damaged", "bytes": info.size, "age_s": round(now - info.modified_at, 1)}
        if span:
            record |= {**_describe(span), "is_reordered": span.is_reordered}
        if as_json:
            print(json.dumps(record))
        else:
            pages = _format_place(record) if span else ""
            print(f"{info.name}  {record['kind']:<8} {pages:<16} {info.size / 2**20:8.1f} MiB")
    if not as_json:
        print(f"{count} objects, {size / 2**20:.1f} MiB")
    return 0


def verify_bucket(tier: remote.Tier) -> int:
    """Read every object and delete the damaged ones. The exit code is 1 where there were any."""
    results = [(info.size, is_intact) for info, is_intact in maintenance.verify(tier)]
    damaged = sum(not is_intact for _, is_intact in results)
    result = f"{damaged} were damaged, and are deleted" if damaged else "all intact"
    print(f"{len(results)} objects, {sum(size for size, _ in results) / 2**20:.1f} MiB: {result}")
    return 1 if damaged else 0


def sweep_bucket(tier: remote.Tier, max_bytes: int, max_age_days: float) -> int:
    """Delete objects that are too old, and the oldest ones beyond `max_bytes`."""
    bucket = tier.open_bucket()
    expired = maintenance.choose_expired(bucket, max_bytes, time() - 86400 * max_age_days)
    for info in expired:
        bucket.delete(info.name)
    print(f"deleted {len(expired)} objects, {sum(info.size for info in expired) / 2**20:.1f} MiB")
    return 0
