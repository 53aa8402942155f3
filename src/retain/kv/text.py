"""A text: the tokens of a request, what keys them, and the chained hashes of their blocks.

The hash of a block covers all tokens up to its end and the first link of the chain. That link covers the tenant's salt,
the model, the windows of its layers, and `extra`. So texts that differ in one of these have no hash in common. Where
`extra` keys the tokens from some position on, as an adapter that is activated there, the tokens before are as without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from retain.types import Ints

KEY_BYTES = 16
NEVER = 2**31 - 1


class Keying(NamedTuple):
    """What keys the tokens of a text from a position on, beside the tokens and the first link."""

    extra: bytes = b""
    begin: int = NEVER

    def count_shared(self, other: Keying, position: int, num_equal: int) -> int:
        """Return how many of `num_equal` equal tokens from a position on are keyed alike."""
        if self == other:
            return num_equal
        return max(min(num_equal, self.begin - position, other.begin - position), 0)


NO_KEYING = Keying()


class Text:
    """The tokens of a prompt and its answer. They are appended, and the last ones may be dropped.

    `salt` is the tenant's. `extra` keys a text beside its tokens, as an adapter or an image would; tokens before
    position `extra_from` are shared with texts that lack it.
    """

    def __init__(self, token_ids: Sequence[int] = (), salt: str = "", extra: bytes = b"", extra_from: int = 0):
        self.salt = salt
        self.extra = extra
        self.extra_from = extra_from
        self.keying = Keying(extra, extra_from) if extra_from else NO_KEYING
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
        return f"{self.salt}\0{self.extra.hex()}" if self.extra and not self.extra_from else self.salt

    def head(self, num_tokens: int) -> Text:
        """Return a text of the first tokens, with the same keys."""
        return Text(self.ids[:num_tokens], self.salt, self.extra, self.extra_from)

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
        return hash_key(link + self.extra) if self.extra and not self.extra_from else link

    def block_hashes(self, first_link: bytes, block_size: int, num_tokens: int | None = None) -> list[bytes]:
        """Return the hashes of the whole blocks of the first `num_tokens` tokens (default: all), in order.

        Each block is hashed once.
        """
        n = (len(self.ids) if num_tokens is None else min(num_tokens, len(self.ids))) // block_size
        hashes = self._chains.setdefault((first_link, block_size), [])
        for end in sorted({min(n, self.keying.begin // block_size), n}):
            if len(hashes) < end:
                rest = self.tokens[len(hashes) * block_size : end * block_size]
                parent = self._link(hashes[-1] if hashes else first_link, len(hashes), end * block_size, block_size)
                hashes += hash_blocks(parent, rest, block_size)
        return hashes[:n]

    def end_hash(self, first_link: bytes, block_size: int, end: int) -> bytes:
        """Return the hash of the tokens up to a position: of a block, or of the first tokens of one."""
        return next(hash for _, hash in self.iter_end_hashes(first_link, block_size, end // block_size, end))

    def iter_end_hashes(self, first_link: bytes, block_size: int, n: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield the ends up to `last` that lie behind n whole blocks, the last first, and the hash of the text to each.

        Where n is not 0 the last of them is the end of these blocks.
        """
        begin = n * block_size
        before = self.block_hashes(first_link, block_size, begin)
        parent = before[-1] if before else first_link
        for end in range(min(begin + block_size - 1, last), begin, -1):
            yield end, hash_block(self._link(parent, n, end, block_size), self.tokens[begin:end])
        if before:
            yield begin, parent

    def _link(self, parent: bytes, n: int, end: int, block_size: int) -> bytes:
        """Return what tokens behind n blocks, up to a position, are hashed with: other keys may begin there."""
        extra, begin = self.keying
        if begin // block_size != n or end <= begin:
            return parent
        return hash_key(parent + extra + begin.to_bytes(8, "little"))


def salt_digest(salt: str) -> bytes:
    """Return what names a salt where its texts are kept, KEY_BYTES. Their first half names the part before a slash.

    A server's salts are an API key's part, a slash, and what a client adds.
    """
    tenant = salt.partition("/")[0]
    parts = (x.encode(errors="surrogatepass") for x in (tenant, salt))
    return b"".join(blake2b(part, digest_size=KEY_BYTES // 2, person=b"salt").digest() for part in parts)


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


def common_prefix_length(a: Ints, b: Ints) -> int:
    """Return how many of the first tokens are equal."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
