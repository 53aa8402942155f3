"""`retain cache ls | verify | clear | sweep | why`: look after the store of a tier, and explain prefix misses."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from math import inf
from time import time
from typing import Any

from retain.kv.stores import maintenance, tiers
from retain.kv.stores.bucket import Bucket, ObjectInfo
from retain.kv.stores.folder import LockedFolder, check_version
from retain.kv.stores.span import CorruptionError, Span
from retain.kv.stores.span_file import VersionError
from retain.kv.stores.tiers import disk, remote
from retain.plugins import needs_extra

AGE_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def cache(args: Namespace) -> int:
    """List, verify, clear or sweep a store, or explain what a cache would have of recorded requests."""
    if args.action == "why":
        return _explain_files(args)
    with _open_bucket(args.path, is_changed=args.action != "ls") as bucket:
        if args.action == "ls":
            return list_spans(bucket, args.json)
        if args.action == "verify":
            return verify_spans(bucket)
        is_clear = args.action == "clear"
        max_bytes = 0 if is_clear else args.max_bytes
        oldest = inf if is_clear else time() - 86400 * args.max_age
        return delete_spans(bucket, maintenance.choose_expired(bucket, max_bytes, oldest))


@contextmanager
def _open_bucket(path: str, is_changed: bool) -> Iterator[Bucket]:
    """Open the place of a store, which no engine uses meanwhile if it has one owner and is to be changed."""
    tier = tiers.parse(path) if ":" in path else disk.Tier(path, capacity=1)
    if isinstance(tier, remote.Tier):
        yield tier.open_bucket()
        return
    if not isinstance(tier, disk.Tier):
        raise ValueError(f"{path!r} is no store: give remote:url=s3://BUCKET/FOLDER, or a disk tier's folder")
    folder = disk.expand_path(tier.path)
    if not (folder / "lock").is_file():
        raise ValueError(f"there is no store at {folder}")
    check_version(folder)
    with closing(LockedFolder(folder)) as bucket:
        if is_changed:
            bucket.claim()
        yield bucket


def _explain_files(args: Namespace) -> int:
    if find_spec("prefix_doctor") is None:
        raise ValueError(
            "cache why needs the package prefix_doctor: in a checkout of retain, pip install packages/prefix_doctor"
        )
    with needs_extra("reading requests", "serve"):
        from prefix_doctor.command import explain_files
    return explain_files(args)


def list_spans(bucket: Bucket, as_json: bool) -> int:
    """Print a line for each span, the last used first; also while engines use the store."""
    now = time()
    spans = sorted(maintenance.iter_spans(bucket), key=lambda found: -found[0].modified_at)
    for info, span in spans:
        record = {"object": info.name, **_describe(span), "bytes": info.size}
        if isinstance(span, Span):
            record |= {"is_reordered": span.is_reordered, "age_s": round(now - span.created_at, 1)}
        record["idle_s"] = round(now - info.modified_at, 1)
        if as_json:
            print(json.dumps(record))
        else:
            used = f"used {_format_age(record['idle_s'])}"
            print(f"{info.name}  {_format_place(record):<18} {info.size / 2**20:8.1f} MiB  {used}")
    if not as_json:
        print(f"{len(spans)} spans, {_total_mib([info for info, _ in spans])}")
    return 0


def verify_spans(bucket: Bucket) -> int:
    """Read every span and delete the damaged ones. The exit code is 1 where there were any. Raises OSError."""
    results = list(maintenance.verify(bucket))
    damaged = sum(not is_intact for _, is_intact in results)
    result = f"{damaged} were damaged, and are deleted" if damaged else "all intact"
    print(f"{len(results)} spans, {_total_mib([info for info, _ in results])}: {result}")
    return 1 if damaged else 0


def delete_spans(bucket: Bucket, infos: Sequence[ObjectInfo]) -> int:
    """Delete these spans. Raises OSError where one cannot be deleted."""
    for info in infos:
        bucket.delete(info.name)
    print(f"deleted {len(infos)} spans, {_total_mib(infos)}")
    return 0


def _total_mib(infos: Sequence[ObjectInfo]) -> str:
    return f"{sum(info.size for info in infos) / 2**20:.1f} MiB"


def _describe(span: Span | CorruptionError) -> dict[str, Any]:
    """Say what a span has: pages of a text, or what the text left at its end, where others can go on from it."""
    if isinstance(span, CorruptionError):
        return {"kind": "other version" if isinstance(span, VersionError) else "damaged"}
    if span.kind == "text":
        return {"kind": span.kind, "first_page": span.start_page, "pages": len(span.keys)}
    return {"kind": span.kind, "first_page": span.start_page, "position": span.resumes_from}


def _format_place(record: dict[str, Any]) -> str:
    if "pages" in record:
        return f"pages {record['first_page']}-{record['first_page'] + record['pages'] - 1}"
    return f"{record['kind']} from {record['position']}" if "position" in record else str(record["kind"])


def _format_age(seconds: float) -> str:
    unit, unit_seconds = next((u for u in AGE_UNITS if seconds >= u[1]), AGE_UNITS[-1])
    return f"{seconds / unit_seconds:.0f} {unit} ago"
