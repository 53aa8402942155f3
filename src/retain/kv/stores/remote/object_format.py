"""The format of a span's object: a header that describes the span and checksums it, then the span's bytes.

    0      magic, version, size of the description, number of checksums, checksum of all of the header
    28     the description as JSON, then a checksum of each block and one of the metadata, 64 bits each
    4096n  the span's bytes, as `Span` lays them out

Objects are immutable, and their names follow from their content: `FORMAT/ab/abcdef...`, where FORMAT is the
fingerprint of the model and the engine, and the rest a hash of the span's keys. Keys are chained from the tenant's
salt and the fingerprint, so an object of other weights, dtype, precision or salt never has the right name and keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Any

from retain.kv.stores.checksums import checksum, span_checksums
from retain.kv.stores.remote.bucket import ObjectInfo
from retain.kv.stores.span import IO_ALIGNMENT, CorruptionError, Span
from retain.types import Bytes

PREFIX = Struct("<8sIIIQ")  # magic, version, bytes of the description, checksums, checksum of the header
MAGIC = b"retainkv"
FORMAT_VERSION = 1
KEY_BYTES = 16
OBJECT_NAME = re.compile(r"([0-9a-f]{2})+/[0-9a-f]{2}/[0-9a-f]{32}")  # others are not ours
FIRST_READ = 16 * 2**10  # bytes that hold most headers whole
MAX_HEADER_BYTES = 16 * 2**20


@dataclass(eq=False)
class RemoteSpan(Span):
    """A span that is an object of a store."""

    name: str = ""  # of the object
    checksums: bytes = b""  # 64 bits for each block of each layer, then 64 bits for the metadata
    data_offset: int = 0  # of the span's bytes in the object
    created_at: float = 0.0  # seconds since 1970, by the writer's clock
    modified_at: float = 0.0  # the same by the store's clock

    @property
    def content_id(self) -> int:
        """Identify the bytes of the span."""
        return int.from_bytes(bytes.fromhex(self.name.rpartition("/")[2])[:8], "little", signed=True)


def object_name(fingerprint: bytes, keys: Sequence[bytes], is_reordered: bool) -> str:
    """Return the name of a span's object."""
    order = b"importance" if is_reordered else b"text"
    digest = blake2b(b"".join(keys), digest_size=KEY_BYTES, person=order).hexdigest()
    return f"{fingerprint.hex()}/{digest[:2]}/{digest}"


def encode_header(fingerprint: bytes, span: Span, data: Bytes, description: dict[str, Any]) -> bytes:
    """Return the header of a span's object, padded to a multiple of IO_ALIGNMENT. `data` are the span's bytes."""
    fields = {
        "format": fingerprint.hex(),
        "about": description,  # for people
        "keys": b"".join(span.keys).hex(),
        "num_blocks": span.num_blocks,
        "block_bytes": span.block_bytes,
        "start_page": span.start_page,
        "kind": span.kind,
        "resumes_from": span.resumes_from,
        "metadata_bytes": span.metadata_bytes,
        "is_reordered": span.is_reordered,
        "created_at": span.last_used_at,
    }
    text = json.dumps(fields).encode()
    sums = span_checksums(span, data)
    own = checksum(text + sums)
    header = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), len(sums) // 8, own) + text + sums
    return header + bytes(-len(header) % IO_ALIGNMENT)


def header_size(start: bytes) -> int:
    """Return the size of a header from its first bytes. Raises CorruptionError where it is none of this format."""
    if len(start) < PREFIX.size:
        raise CorruptionError("the object is shorter than a header")
    magic, version, text_size, num_sums, _ = PREFIX.unpack_from(start)
    size = PREFIX.size + int(text_size) + 8 * int(num_sums)
    if magic != MAGIC or version != FORMAT_VERSION or size > MAX_HEADER_BYTES:
        raise CorruptionError("the object is no span, or of another version")
    return size


def decode_header(header: bytes, info: ObjectInfo) -> RemoteSpan:
    """Return the span of a whole header. Raises CorruptionError unless header, name and size agree."""
    size = header_size(header)
    _, _, text_size, _, own = PREFIX.unpack_from(header)
    text = header[PREFIX.size : PREFIX.size + text_size]
    sums = header[PREFIX.size + text_size : size]
    if len(header) < size or checksum(text + sums) != own:
        raise CorruptionError("the header differs from what was written")
    try:
        span = _parse_fields(json.loads(text), info, sums)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"the header makes no sense: {error!r}") from None
    span.data_offset = -(-size // IO_ALIGNMENT) * IO_ALIGNMENT
    if span.data_offset + span.size != info.size or len(sums) != 8 * (sum(span.num_blocks) + 1):
        raise CorruptionError("the object is not as large as its header says")
    return span


def _parse_fields(fields: dict[str, Any], info: ObjectInfo, sums: bytes) -> RemoteSpan:
    joined = bytes.fromhex(fields["keys"])
    span = RemoteSpan(
        keys=tuple(joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)),
        num_blocks=_counts(fields["num_blocks"]),
        block_bytes=int(fields["block_bytes"]),
        start_page=int(fields["start_page"]),
        kind=str(fields["kind"]),
        resumes_from=int(fields["resumes_from"]),
        metadata_bytes=int(fields["metadata_bytes"]),
        is_reordered=bool(fields["is_reordered"]),
        created_at=float(fields["created_at"]),
        name=info.name,
        modified_at=info.modified_at,
        checksums=sums,
    )
    if min(span.block_bytes, span.start_page, span.metadata_bytes, span.resumes_from) < 0:
        raise ValueError("negative sizes")
    if object_name(bytes.fromhex(fields["format"]), span.keys, span.is_reordered) != info.name:
        raise ValueError("another span's object has this name")
    return span


def _counts(values: Sequence[Any]) -> tuple[int, ...]:
    counts = tuple(int(v) for v in values)
    if any(n < 0 for n in counts):
        raise ValueError("negative counts")
    return counts
