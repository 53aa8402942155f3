"""Reads the files of a store. Written from docs/design/stores.md alone: it imports nothing of retain."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from struct import unpack_from
from typing import Any

from xxhash import xxh3_64_intdigest

NAME = re.compile(r"(?P<format>([0-9a-f]{2})+)/(?P<folder>[0-9a-f]{2})/(?P<digest>[0-9a-f]{32})")


@dataclass(frozen=True)
class ReadSpan:
    """What a file holds: its description, its keys, the blocks of each layer and the metadata."""

    fields: dict[str, Any]
    keys: list[bytes]
    layers: list[list[bytes]]
    metadata: bytes


def align(size: int) -> int:
    return (size + 4095) // 4096 * 4096


def read_span(name: str, content: bytes) -> ReadSpan:
    """Read a whole file. Raises ValueError where a reader must refuse it."""
    magic, version, num_text, num_sums, own_sum = unpack_from("<8sIIIQ", content)
    if magic != b"retainkv" or version != 2:
        raise ValueError("no span of version 2")
    end = 28 + num_text + 8 * num_sums
    if xxh3_64_intdigest(content[28:end]) != own_sum:
        raise ValueError("the header is damaged")
    fields = json.loads(content[28 : 28 + num_text])
    sums = list(unpack_from(f"<{num_sums}Q", content, 28 + num_text))
    joined = bytes.fromhex(fields["keys"])
    check_name(name, fields, joined)
    size, at = fields["block_bytes"], align(end)
    layers = []
    for n in fields["num_blocks"]:
        layers.append([content[at + i * size : at + (i + 1) * size] for i in range(n)])
        at += align(n * size)
    metadata = content[at : at + fields["metadata_bytes"]]
    if at + align(fields["metadata_bytes"]) != len(content):
        raise ValueError("the size is wrong")
    if [xxh3_64_intdigest(x) for layer in layers for x in layer] + [xxh3_64_intdigest(metadata)] != sums:
        raise ValueError("the data are damaged")
    return ReadSpan(fields, [joined[i : i + 16] for i in range(0, len(joined), 16)], layers, metadata)


def check_name(name: str, fields: dict[str, Any], joined_keys: bytes) -> None:
    """Raise ValueError unless a file has the name that follows from its content."""
    found = NAME.fullmatch(name)
    person = b"2 importance" if fields["is_reordered"] else b"2 text"
    digest = blake2b(joined_keys, digest_size=16, person=person).hexdigest()
    if not found or (found["format"], found["folder"], found["digest"]) != (fields["format"], digest[:2], digest):
        raise ValueError("the name is another span's")
