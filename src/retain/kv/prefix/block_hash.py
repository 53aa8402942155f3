"""Chained hashes of pages: the hash of a page covers all tokens up to its end, and the root hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from retain.types import Ints


def hash_block(parent_hash: bytes, tokens: Ints) -> bytes:
    """Hash the tokens of a page that follows the page (or the root) of `parent_hash`."""
    return blake2b(parent_hash + tokens.tobytes(), digest_size=16).digest()


def hash_blocks(root_hash: bytes, tokens: Ints, page_size: int) -> list[bytes]:
    """Hash every whole page of a text, in order."""
    block_hash = root_hash
    found = []
    for i in range(0, len(tokens) - page_size + 1, page_size):
        found.append(block_hash := hash_block(block_hash, tokens[i : i + page_size]))
    return found


def iter_end_hashes(block_hashes: Sequence[bytes], tokens: Ints, page_size: int, n: int) -> Iterator[tuple[int, bytes]]:
    """Yield the ends of a text that lie behind its n whole pages, the last first, and the hash of the text up to each.

    The first of them is the end of these pages.
    """
    begin = n * page_size
    for end in range(min(begin + page_size - 1, len(tokens)), begin, -1):
        yield end, hash_block(block_hashes[n - 1], tokens[begin:end])
    yield begin, block_hashes[n - 1]


def common_prefix_length(a: Ints, b: Ints) -> int:
    """Return how many of the first tokens are equal."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
