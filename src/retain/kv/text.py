"""A text: the tokens of a request, what keys them, and the chained hashes of their blocks.

The hash of a block covers all tokens up to its end and the first link of the chain. That link covers the tenant's salt,
the model, the windows of its layers, and `extra`. So texts that differ in one of these have no hash in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from retain.types import Ints

KEY_BYTES = 16


class Text:
    """The tokens of a prompt and its answer. They are appended, and the last ones may be dropped.

    `salt` is the tenant's. `extra` keys a text beside its tokens, as an adapter or an image would.
    """

    def __init__(self, token_ids: Sequence[int] = (), salt: str = "", extra: bytes = b""):
        self.salt = salt
        self.extra = extra
        self.ids: list[int] = list(token_ids)  # only `drop` removes some
        self._array: Ints = np.zeros(max(len(self.ids), KEY_BYTES), np.int32)
        self._num_copied = 0  # of `ids` to the array
        self._chains: dict[tuple[bytes, int], list[bytes]] = {}  # hashes of blocks, by first link and block size

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> Ints:
        """The token ids, int32 [n]: a view, which must not be written to."""
        n = len(self.ids)
        if n > len(self._array):
            self._array = np.concatenate([self._array, np.zeros(n, np.int32)])  # at least twice as long
        if n > self._num_copied:
            self._array[self._num_copied : n] = self.ids[self._num_copied :]
            self._num_copied = n
        return self._array[:n]

    @property
    def group(self) -> str:
        """What texts have in common that may share prefixes, beside model and windows: the salt and `extra`."""
        return f"{self.salt}\0{self.extra.hex()}" if self.extra else self.salt

    def drop(self, num_tokens: int) -> None:
        """Remove tokens from the end of the text, with the hashes of blocks that held them."""
        n = len(self.ids) - num_tokens
        del self.ids[n:]
        self._num_copied = min(self._num_copied, n)
        for (_, block_size), hashes in self._chains.items():
            del hashes[n // block_size :]

    def first_link(self, windows: Ints, model: bytes = b"") -> bytes:
        """Return the hash that every chain of this salt, these windows [L], this model and this `extra` begins with."""
        key = model + b"\0" + self.salt.encode(errors="surrogatepass") + b"\0" + windows.tobytes()
        link = hash_key(key)
        return hash_key(link + self.extra) if self.extra else link

    def block_hashes(self, first_link: bytes, block_size: int, num_tokens: int | None = None) -> list[bytes]:
        """Return the hashes of the whole blocks of the first `num_tokens` tokens (default: all), in order.

        Each block is hashed once.
        """
        n = (len(self.ids) if num_tokens is None else min(num_tokens, len(self.ids))) // block_size
        hashes = self._chains.setdefault((first_link, block_size), [])
        if len(hashes) < n:
            rest = self.tokens[len(hashes) * block_size : n * block_size]
            hashes += hash_blocks(hashes[-1] if hashes else first_link, rest, block_size)
        return hashes[:n]


def hash_key(key: bytes) -> bytes:
    """Return a hash of KEY_BYTES bytes."""
    return blake2b(key, digest_size=KEY_BYTES).digest()


def hash_block(parent_hash: bytes, tokens: Ints) -> bytes:
    """Hash the tokens of a block together with the hash of the block before it, or of the first link."""
    return hash_key(parent_hash + tokens.tobytes())


def hash_blocks(parent_hash: bytes, tokens: Ints, block_size: int) -> list[bytes]:
    """Hash every whole block of these tokens, in order; they follow the block, or the first link, of `parent_hash`."""
    found = []
    data = tokens.tobytes()
    size = block_size * tokens.itemsize
    for i in range(0, len(data) - size + 1, size):
        found.append(parent_hash := hash_key(parent_hash + data[i : i + size]))
    return found


def iter_end_hashes(
    block_hashes: Sequence[bytes], tokens: Ints, block_size: int, n: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the ends of a text that lie behind its n whole blocks, the last first, and the hash of the text up to each.

    The last of them is the end of these blocks, of which there is at least one.
    """
    begin = n * block_size
    for end in range(min(begin + block_size - 1, len(tokens)), begin, -1):
        yield end, hash_block(block_hashes[n - 1], tokens[begin:end])
    yield begin, block_hashes[n - 1]


def common_prefix_length(a: Ints, b: Ints) -> int:
    """Return how many of the first tokens are equal."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
