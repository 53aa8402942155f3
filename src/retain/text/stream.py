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

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling: printable latin-1 characters are their own byte, the other bytes count up from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Pieces:
    """The bytes of every token of one tokenizer.

    `byte_level`: tokens are spelled in GPT-2's alphabet. Otherwise as in SentencePiece: "▁" is a space, "<0x41>" is
    a byte, and with `strip` the text loses the one space that the tokenizer put before it.
    """

    def __init__(self, core: Core, special: frozenset[int], byte_level: bool, strip: bool):
        self.strip = strip
        # SentencePiece shows every byte that is no character as one U+FFFD, byte level every broken character as one.
        self.errors = "replace" if byte_level else "surrogateescape"
        self._core, self._special = core, special
        self._alphabet = byte_alphabet() if byte_level else None
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token; none for a special token or one that the vocabulary does not have."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = b"" if token in self._special else self.spelled(token)
        return piece

    def spelled(self, token: int) -> bytes:
        """The bytes of a token, also of a special one."""
        text = self._core.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        if self._alphabet is None:
            byte = BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        try:
            return bytes(self._alphabet[c] for c in text)
        except KeyError:  # an added token, written as it is
            return text.encode()

    def text(self, data: bytes) -> str:
        """All the text that the bytes of some tokens stand for."""
        text = shown(data.decode(errors=self.errors))
        return text[1:] if self.strip and text.startswith(" ") else text


def shown(text: str) -> str:
    """Text with U+FFFD for every byte that was no character."""
    return text if text.isascii() else re.sub("[\udc80-\udcff]", "\ufffd", text)


class Stream:
    """One answer, token by token.

    What `push` and `close` return, strung together, is what `decode` gives for all the tokens, up to the first stop
    string. Where several stop strings come up, that one counts which is complete first.
    """

    def __init__(self, pieces: Pieces, stop: Sequence[str] = ()):
        """Raises ValueError for an empty stop string."""
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self._pieces, self._stop = pieces, tuple(stop)
        self._longest = max(map(len, self._stop), default=1) - 1  # of what may have to wait for its rest
        self._characters = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._strip = pieces.strip
        self._held = ""  # the beginning of a stop string, perhaps
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All that was returned so far."""
        self._shown = ["".join(self._shown)]  # asked for after every token, it is not put together anew each time
        return self._shown[0]

    def push(self, token: int) -> str:
        """The new text that may be shown after one more token; after a stop string, nothing."""
        return "" if self.stopped else self._show(self._characters.decode(self._pieces[token]))

    def close(self) -> str:
        """No more tokens: the text that was held back."""
        if self.stopped:
            return ""
        rest = self._show(self._characters.decode(b"", final=True))
        held, self._held = self._held, ""
        self._shown.append(held)
        return rest + held

    def _show(self, text: str) -> str:
        text = shown(text)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        if self._stop:
            text = self._before_stop(self._held + text)
        self._shown.append(text)
        return text

    def _before_stop(self, text: str) -> str:
        """The part of the text that surely comes before every stop string; the rest is held, or dropped at a hit."""
        if hits := [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]:
            self.stopped = True
            self._held = ""
            return text[: min(hits)[1]]
        for n in range(min(len(text), self._longest), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stop):
                self._held = text[-n:]
                return text[:-n]
        self._held = ""
        return text
