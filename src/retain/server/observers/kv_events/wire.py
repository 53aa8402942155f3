"""Events as vLLM 0.24 and later send them: a batch is an array, an event is a map.

Consumers differ in what they accept. These fields, and no others, are read by all of them: `lora_id` and the other
fields without a default must be there, and a hash must be an unsigned integer of 64 bits other than 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from retain.types import Ints

Event = dict[str, Any]
# The medium that routers take for the fastest. It names the pool of pages on every device.
MEDIUM = "GPU"
GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SALT_BYTES = 16


class Block(NamedTuple):
    """A whole page of a text, under its number on the wire."""

    parent: int | None  # the page before it
    tokens: Ints  # [page_size]
    group: str


def to_block_number(block_hash: bytes) -> int:
    """Return the low 64 bits of a page's key; never 0, which some consumers read as the beginning of a text."""
    return int.from_bytes(block_hash[-8:], "big") or 1


def block_stored(parent: int | None, numbers: Sequence[int], tokens: Sequence[int], group: str) -> Event:
    """Return the event of consecutive pages that follow `parent`; they have equally many of the tokens.

    The group (`Text.group`) is named at the beginning of a text only, by a digest: it is derived from the API key.
    """
    event: Event = {
        "type": "BlockStored",
        "block_hashes": numbers,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(numbers),
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    if group and parent is None:
        digest = blake2b(group.encode(errors="surrogatepass"), digest_size=SALT_BYTES).hexdigest()
        event["extra_keys"] = [[digest], *[None] * (len(numbers) - 1)]
    return event | GROUP


def block_removed(numbers: Sequence[int]) -> Event:
    """Return the event of pages that were evicted."""
    return {"type": "BlockRemoved", "block_hashes": numbers, "medium": MEDIUM, "group_idx": 0}


def all_blocks_cleared() -> Event:
    """Return the event after which nothing is cached."""
    return {"type": "AllBlocksCleared"}


def encode_sequence_number(number: int) -> bytes:
    """Return the frame of a batch's number."""
    return number.to_bytes(8, "big")
