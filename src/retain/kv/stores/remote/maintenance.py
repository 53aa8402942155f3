"""What people do with a bucket of spans, beside the engines that use it: list, verify and sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from math import inf

from retain.kv.stores.remote.bucket import Bucket, ObjectInfo
from retain.kv.stores.remote.index import read_header
from retain.kv.stores.remote.object_format import OBJECT_NAME, RemoteSpan, object_name
from retain.kv.stores.span import CorruptionError
from retain.kv.stores.tiers.remote import Tier


def iter_spans(bucket: Bucket) -> Iterator[tuple[ObjectInfo, RemoteSpan | None]]:
    """Yield every object that is named as a span, with its span; None for a damaged one. Raises OSError."""
    for info in bucket.list(""):
        if not OBJECT_NAME.fullmatch(info.name):
            continue  # it may be somebody's file: it is neither listed nor deleted
        try:
            yield info, read_header(bucket, info)
        except FileNotFoundError:
            continue  # it was deleted since it was listed
        except PermissionError:
            continue  # it is somebody else's
        except CorruptionError:
            yield info, None


def verify(tier: Tier) -> Iterator[tuple[ObjectInfo, bool]]:
    """Read every object, and delete the damaged ones. Yields each with whether it is intact. Raises OSError."""
    bucket = tier.open_bucket()
    with closing(tier.open()) as store:
        for info, span in iter_spans(bucket):
            is_intact = span is not None
            if span:
                with closing(store.open(span, inf)) as reader:
                    try:
                        for layer, blocks in enumerate(span.num_blocks):
                            reader.read_blocks(layer, 0, blocks)
                        reader.read_metadata()
                    except CorruptionError:
                        is_intact = False
            if not is_intact:
                bucket.delete(info.name)
            yield info, is_intact


def choose_expired(bucket: Bucket, max_bytes: int, oldest: float) -> list[ObjectInfo]:
    """Return objects to delete: those modified before `oldest`, and the oldest ones beyond `max_bytes` in all.

    Spans in text order go too where the same tokens are there in order of importance. Raises OSError.
    """
    spans = sorted(iter_spans(bucket), key=lambda found: -found[0].modified_at)
    names = {info.name for info, _ in spans}
    expired = []
    total = 0
    for info, span in spans:
        folder = bytes.fromhex(info.name.partition("/")[0]) if span else b""
        is_superseded = bool(span and not span.is_reordered and object_name(folder, span.keys, True) in names)
        if is_superseded or info.modified_at < oldest or total + info.size > max_bytes:
            expired.append(info)
        else:
            total += info.size
    return expired
