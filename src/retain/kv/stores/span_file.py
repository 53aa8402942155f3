"""The bytes of a stored span: a header that describes and checksums it, then its data. See docs/design/stores.md.

Files of a folder and objects of an object store are the same bytes. Their names follow from their content, so they
never change, except that damaged ones are written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from retain.kv.stores.bucket import Bucket, ObjectInfo
from retain.kv.stores.span import IO_ALIGNMENT, CorruptionError, Span, SpanFormat
from retain.types import Bytes

PREFIX = Struct("<8sIIIQ")  # magic, version, bytes of the description, checksums, checksum of the header
MAGIC = b"retainkv"
FORMAT_VERSION = 2
KEY_BYTES = 16
SPAN_NAME = re.compile(r"((?:[0-9a-f]{2})+)/[0-9a-f]{2}/[0-9a-f]{32}")  # files with other names are not ours
FIRST_READ = 16 * 2**10  # bytes that hold most headers whole
MAX_HEADER_BYTES = 16 * 2**20


class VersionError(CorruptionError):
    """A span of another version of the format."""


def checksum(data: bytes | Bytes) -> int:
    """Return a 64-bit checksum (xxHash3)."""
    return xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)


def span_name(fingerprint: bytes, keys: Sequence[bytes], is_reordered: bool) -> str:
    """Return the name of a span's file."""
    order = b"%d importance" if is_reordered else b"%d text"
    digest = blake2b(b"".join(keys), digest_size=KEY_BYTES, person=order % FORMAT_VERSION).hexdigest()
    return f"{fingerprint.hex()}/{digest[:2]}/{digest}"


def encode_header(span_format: SpanFormat, span: Span, data: Bytes) -> bytes:
    """Return the header of a span's file, padded to a multiple of IO_ALIGNMENT. `data` are the span's bytes."""
    fields = {
        "format": span_format.fingerprint.hex(),
        "about": span_format.description,
        "kind": span.kind,
        "keys": b"".join(span.keys).hex(),
        "num_blocks": span.num_blocks,
        "block_bytes": span.block_bytes,
        "start_page": span.start_page,
        "resumes_from": span.resumes_from,
        "salt_digest": span.salt_digest.hex(),
        "metadata_bytes": span.metadata_bytes,
        "is_reordered": span.is_reordered,
        "created_at": span.last_used_at,
    }
    text = json.dumps(fields).encode()
    blocks = [block for layer in range(len(span.num_blocks)) for block in span.view_layer(data, layer)]
    sums = np.array([checksum(x) for x in (*blocks, span.view_metadata(data))], np.uint64).tobytes()
    header = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), len(sums) // 8, checksum(text + sums)) + text + sums
    return header + bytes(-len(header) % IO_ALIGNMENT)


def header_size(start: bytes) -> int:
    """Return the size of a header from its first bytes. Raises CorruptionError where it is none of this format."""
    if len(start) < PREFIX.size:
        raise CorruptionError("it is shorter than a header")
    magic, version, text_size, num_sums, _ = PREFIX.unpack_from(start)
    size = PREFIX.size + int(text_size) + 8 * int(num_sums)
    if magic != MAGIC:
        raise CorruptionError("it is no span")
    if version != FORMAT_VERSION:
        raise VersionError(f"it has version {version} of the format of stores, and this is version {FORMAT_VERSION}")
    if size > MAX_HEADER_BYTES:
        raise CorruptionError("its header is too large")
    return size


def decode_header(header: bytes, info: ObjectInfo) -> tuple[Span, SpanFormat]:
    """Return the span of a whole header. Raises CorruptionError unless header, name and size agree."""
    size = header_size(header)
    _, _, text_size, _, own = PREFIX.unpack_from(header)
    text = header[PREFIX.size : PREFIX.size + text_size]
    sums = header[PREFIX.size + text_size : size]
    if len(header) < size or checksum(text + sums) != own:
        raise CorruptionError("the header differs from what was written")
    try:
        fields = json.loads(text)
        span = _parse_fields(fields, info, sums, -(-size // IO_ALIGNMENT) * IO_ALIGNMENT)
        span_format = SpanFormat(bytes.fromhex(fields["format"]), dict(fields["about"]))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptionError(f"the header makes no sense: {error!r}") from None
    if span_name(span_format.fingerprint, span.keys, span.is_reordered) != info.name:
        raise CorruptionError("another span has this name")
    if span.size != info.size or len(sums) != 8 * (sum(span.num_blocks) + 1):
        raise CorruptionError("it is not as large as its header says")
    span.content_id = own - 2**63  # signed
    return span, span_format


def _parse_fields(fields: dict[str, Any], info: ObjectInfo, sums: bytes, data_offset: int) -> Span:
    joined = bytes.fromhex(fields["keys"])
    span = Span(
        keys=tuple(joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)),
        num_blocks=tuple(map(int, fields["num_blocks"])),
        block_bytes=int(fields["block_bytes"]),
        start_page=int(fields["start_page"]),
        kind=str(fields["kind"]),
        resumes_from=int(fields["resumes_from"]),
        salt_digest=bytes.fromhex(fields.get("salt_digest", "")),
        metadata_bytes=int(fields["metadata_bytes"]),
        is_reordered=bool(fields["is_reordered"]),
        last_used_at=info.modified_at,
        name=info.name,
        checksums=sums,
        data_offset=data_offset,
        created_at=float(fields["created_at"]),
        modified_at=info.modified_at,
    )
    if (
        not span.keys
        or min(span.block_bytes, span.start_page, span.metadata_bytes, span.resumes_from, *span.num_blocks) < 0
    ):
        raise ValueError("no keys, or negative sizes")
    return span


def read_header(bucket: Bucket, info: ObjectInfo) -> tuple[Span, SpanFormat]:
    """Read the span that a file holds. Raises OSError, and CorruptionError where it is none."""
    start = bucket.get(info.name, 0, min(FIRST_READ, info.size)).tobytes()
    if (size := header_size(start)) > len(start):
        start += bucket.get(info.name, len(start), size).tobytes()
    return decode_header(start, info)
