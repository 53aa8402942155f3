"""`retain cache ls | verify | sweep remote:url=...`: look after a bucket that engines share."""

from __future__ import annotations

import json
from time import time

from retain.kv.offload.remote import maintenance
from retain.kv.offload.tiers import parse
from retain.kv.offload.tiers.remote import Tier


def parse_remote(spec: str) -> Tier:
    """Return the remote tier that a spec names. Raises ValueError."""
    tier = parse(spec)
    if not isinstance(tier, Tier):
        raise ValueError(f"{spec!r} is no remote tier: give remote:url=s3://BUCKET/FOLDER, or a disk tier's folder")
    return tier


def list_bucket(tier: Tier, as_json: bool) -> int:
    """Print a line for each object."""
    count = 0
    size = 0
    now = time()
    for info, span in maintenance.iter_spans(tier.open_bucket()):
        count = count + 1
        size = size + info.size
        kind = "damaged" if span is None else "windows" if span.window_starts else "text"
        record = {"object": info.name, "kind": kind, "bytes": info.size, "age_s": round(now - info.modified_at, 1)}
        if span:
            record |= {"first_page": span.start_page, "pages": len(span.keys), "is_reordered": span.is_reordered}
        if as_json:
            print(json.dumps(record))
        else:
            pages = f"pages {span.start_page}-{span.start_page + len(span.keys) - 1}" if span else ""
            print(f"{info.name}  {kind:<8} {pages:<16} {info.size / 2**20:8.1f} MiB")
    if not as_json:
        print(f"{count} objects, {size / 2**20:.1f} MiB")
    return 0


def verify_bucket(tier: Tier) -> int:
    """Read every object and delete the damaged ones. The exit code is 1 where there were any."""
    results = [(info.size, is_intact) for info, is_intact in maintenance.verify(tier)]
    damaged = sum(not is_intact for _, is_intact in results)
    result = f"{damaged} were damaged, and are deleted" if damaged else "all intact"
    print(f"{len(results)} objects, {sum(size for size, _ in results) / 2**20:.1f} MiB: {result}")
    return 1 if damaged else 0


def sweep_bucket(tier: Tier, max_bytes: int, max_age_days: float) -> int:
    """Delete objects that are too old, and the oldest ones beyond `max_bytes`."""
    bucket = tier.open_bucket()
    expired = maintenance.choose_expired(bucket, max_bytes, time() - 86400 * max_age_days)
    for info in expired:
        bucket.delete(info.name)
    print(f"deleted {len(expired)} objects, {sum(info.size for info in expired) / 2**20:.1f} MiB")
    return 0
