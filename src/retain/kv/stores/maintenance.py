"""What people do with the spans of a bucket, beside the engines that use it: list, verify and sweep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import time

from retain.kv.stores.bucket import Bucket, ObjectInfo
from retain.kv.stores.folder import DRAFT_NAME
from retain.kv.stores.reader import SpanReader
from retain.kv.stores.span import CorruptionError, Span
from retain.kv.stores.span_file import SPAN_NAME, VersionError, read_header, span_name

DRAFT_SECONDS = 86400.0  # after which nobody writes a draft any more


def iter_spans(bucket: Bucket) -> Iterator[tuple[ObjectInfo, Span | CorruptionError]]:
    """Yield every object that is named as a span, with its span, or what is wrong with it. Raises OSError."""
    for info in bucket.list(""):
        if not SPAN_NAME.fullmatch(info.name):
            continue  # it may be somebody's file: it is neither listed nor deleted
        try:
            yield info, read_header(bucket, info)[0]
        except (FileNotFoundError, PermissionError):
            continue  # it was deleted since it was listed, or is somebody else's
        except CorruptionError as error:
            yield info, error


def verify(bucket: Bucket) -> Iterator[tuple[ObjectInfo, bool]]:
    """Read every span, and delete the damaged ones. Yields each with whether it is intact. Raises OSError."""
    for info, span in iter_spans(bucket):
        if isinstance(span, VersionError):
            continue
        is_intact = isinstance(span, Span)
        if isinstance(span, Span):
            try:
                SpanReader(span, partial(bucket.get, info.name), lambda: None).read_all()
            except CorruptionError:
                is_intact = False
        if not is_intact:
            bucket.delete(info.name)
        yield info, is_intact


def choose_expired(bucket: Bucket, max_bytes: int, oldest: float) -> list[ObjectInfo]:
    """Return objects to delete: those modified before `oldest`, and the oldest ones beyond `max_bytes` in all.

    Spans in text order go too where the same tokens are there in order of importance, and so do drafts that nobody
    writes any more. Raises OSError.
    """
    spans = sorted(iter_spans(bucket), key=lambda found: -found[0].modified_at)
    names = {info.name for info, _ in spans}
    expired = []
    total = 0
    for info, span in spans:
        is_superseded = False
        if isinstance(span, Span) and not span.is_reordered:
            is_superseded = span_name(bytes.fromhex(info.name.partition("/")[0]), span.keys, True) in names
        if is_superseded or info.modified_at < oldest or total + info.size > max_bytes:
            expired.append(info)
        else:
            total += info.size
    drafts = (info for info in bucket.list("") if DRAFT_NAME.fullmatch(info.name))
    return expired + [info for info in drafts if info.modified_at < time() - DRAFT_SECONDS]
