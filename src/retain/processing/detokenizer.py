"""From tokens to text that may be shown now: no broken characters, nothing of a stop string, no more delay than that.

A token is some bytes. `Pieces` knows which, for the two kinds of decoder that language models have; a `Stream`
strings them together. What is not known here: how text becomes tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Core

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def unicode_to_bytes() -> dict[str, int]:
    """GPT-2's spelling: printable latin-1 characters are their own byte, the other bytes count up from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class TokenBytes:
    """The bytes of every token of one tokenizer.

    `byte_level`: tokens are spelled in GPT-2's alphabet. Otherwise as in SentencePiece: "▁" is a space, "<0x41>" is
    a byte, and with `strip` the text loses the one space that the tokenizer put before it.
    """

    def __init__(self, core: Core, special_token_ids: frozenset[int], byte_level: bool, strip_space: bool):
        self.strip_space = strip_space
        # SentencePiece shows every byte that is no character as one U+FFFD, byte level every broken character as one.
        self.errors = "replace" if byte_level else "surrogateescape"
        self._core, self._special_token_ids = core, special_token_ids
        self._alphabet_bytes = unicode_to_bytes() if byte_level else None
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token; none for a special token or one that the vocabulary does not have."""
        piece = self._cache.get(token)
        if piece is None:
            piece = self._cache[token] = b"" if token in self._special_token_ids else self.raw_bytes(token)
        return piece

    def raw_bytes(self, token: int) -> bytes:
        """The bytes of a token, also of a special one."""
        text = self._core.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        if self._alphabet_bytes is None:
            byte = BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        try:
            return bytes(self._alphabet_bytes[c] for c in text)
        except KeyError:  # an added token, written as it is
            return text.encode()

    def decode(self, data: bytes) -> str:
        """All the text that the bytes of some tokens stand for."""
        text = replace_invalid(data.decode(errors=self.errors))
        return text[1:] if self.strip_space and text.startswith(" ") else text


def replace_invalid(text: str) -> str:
    """Text with U+FFFD for every byte that was no character."""
    return text if text.isascii() else re.sub("[\udc80-\udcff]", "\ufffd", text)


class IncrementalDetokenizer:
    """One answer, token by token.

    What `push` and `close` return, strung together, is what `decode` gives for all the tokens, up to the first stop
    string. Where several stop strings come up, that one counts which is complete first.
    """

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = ()):
        """Raises ValueError for an empty stop string."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self._token_bytes, self._stop_strings = token_bytes, tuple(stop)
        self._max_held_chars = max(map(len, self._stop_strings), default=1) - 1  # of what may have to wait for its rest
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(token_bytes.errors)
        self._strip_space = token_bytes.strip_space
        self._held_text = ""  # the beginning of a stop string, perhaps
        self._text_parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was returned so far."""
        self._text_parts = [
            "".join(self._text_parts)
        ]  # asked for after every token, it is not put together anew each time
        return self._text_parts[0]

    def add_token(self, token: int) -> str:
        """The new text that may be shown after one more token; after a stop string, nothing."""
        return "" if self.stopped else self._append_text(self._utf8_decoder.decode(self._token_bytes[token]))

    def flush(self) -> str:
        """No more tokens: the text that was held back."""
        if self.stopped:
            return ""
        rest = self._append_text(self._utf8_decoder.decode(b"", final=True))
        held, self._held_text = self._held_text, ""
        self._text_parts.append(held)
        return rest + held

    def _append_text(self, text: str) -> str:
        text = replace_invalid(text)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        if self._stop_strings:
            text = self._cut_at_stop(self._held_text + text)
        self._text_parts.append(text)
        return text

    def _cut_at_stop(self, text: str) -> str:
        """The part of the text that surely comes before every stop string; the rest is held, or dropped at a hit."""
        if hits := [(at + len(s), at) for s in self._stop_strings if (at := text.find(s)) >= 0]:
            self.stopped = True
            self._held_text = ""
            return text[: min(hits)[1]]
        for n in range(min(len(text), self._max_held_chars), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop_strings):
                self._held_text = text[-n:]
                return text[:-n]
        self._held_text = ""
        return text
