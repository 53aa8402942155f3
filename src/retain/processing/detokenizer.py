"""Incremental detokenization: text that never breaks a character, never shows a stop string, and is never late.

TokenBytes has the bytes of each token, for byte-level and SentencePiece decoders. IncrementalDetokenizer joins them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from copy import copy

from tokenizers import Tokenizer as Core

from retain.processing.reasoning import Reasoning, TextPart
from retain.processing.stop_strings import StopStrings, StopStringSearch

MAX_CHARACTER_BYTES = 4  # in UTF-8
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def unicode_to_bytes() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable latin-1 characters are their own byte, the others follow U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class TokenBytes:
    """Look up the bytes of a tokenizer's tokens.

    `byte_level`: tokens are written in GPT-2's alphabet. Otherwise they are SentencePiece's: "▁" is a space, "<0x41>"
    is a byte. `strip_space` removes the space that the tokenizer puts before a text.
    """

    def __init__(self, core: Core, special_token_ids: frozenset[int], byte_level: bool, strip_space: bool):
        self.strip_space = strip_space
        # SentencePiece shows each invalid byte as one U+FFFD, byte level each broken character as one.
        self.errors = "replace" if byte_level else "surrogateescape"
        self._core = core
        self._special_token_ids = special_token_ids
        self._alphabet_bytes = unicode_to_bytes() if byte_level else None
        self._cache: dict[int, bytes] = {}
        self._showing: dict[frozenset[int], TokenBytes] = {}

    def showing(self, shown: frozenset[int]) -> TokenBytes:
        """Return the same with text for some special tokens. It is kept: every answer of a chat may need it."""
        if shown not in self._showing:
            found = copy(self)
            found._special_token_ids = self._special_token_ids - shown
            found._cache = {}
            self._showing[shown] = found
        return self._showing[shown]

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of a token; none for a special or an unknown token."""
        data = self._cache.get(token)
        if data is None:
            data = self._cache[token] = b"" if token in self._special_token_ids else self.raw_bytes(token)
        return data

    def raw_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, special tokens included; none for an unknown token."""
        text = self._core.id_to_token(token) if 0 <= token < 1 << 32 else None
        if text is None:
            return b""
        if self._alphabet_bytes is None:
            byte = BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()
        try:
            return bytes(self._alphabet_bytes[c] for c in text)
        except KeyError:  # an added token, whose text is not in the alphabet
            return text.encode()

    def decode(self, data: bytes) -> str:
        """Return the text of the joined bytes of some tokens that begin a text."""
        text = replace_invalid(data.decode(errors=self.errors))
        return text[1:] if self.strip_space and text.startswith(" ") else text

    def starts_text(self, preceding: Sequence[int]) -> bool:
        """Return whether a text begins after these tokens: none of them has any text."""
        return not any(self[token] for token in preceding)

    def last_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the last bytes of some tokens: at least as many as one character has, if there are so many."""
        data = b""
        for token in reversed(tokens):
            if len(data) >= MAX_CHARACTER_BYTES:
                break
            data = self[token] + data
        return data


def replace_invalid(text: str) -> str:
    """Replace each invalid byte (a surrogate in `text`) by U+FFFD."""
    return text if text.isascii() else re.sub("[\udc80-\udcff]", "\ufffd", text)


class IncrementalDetokenizer:
    """Decode one answer token by token.

    The joined results of `add_token` and `flush`, up to the first stop string, are what the answer adds to the text of
    the `preceding` tokens, its prompt: an answer in the middle of a text keeps its first space, and completes a
    character that the prompt began. The first stop string is the one that is complete first, of those that the first
    `min_tokens` tokens do not complete. Stop strings are searched behind the `reasoning`, if the text may have any.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop: StopStrings | None = None,
        preceding: Sequence[int] = (),
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ):
        self._token_bytes = token_bytes
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self._stop_search = StopStringSearch(stop or StopStrings())
        self._splitter = reasoning.create_splitter() if reasoning else None
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(token_bytes.errors)
        self._utf8_decoder.decode(token_bytes.last_bytes(preceding))  # keeps what is incomplete, and no more
        self._strip_space = token_bytes.strip_space and token_bytes.starts_text(preceding)
        self._text_parts: list[str] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop_search.found

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._stop_search.found is not None

    @property
    def text(self) -> str:
        """Return all text until now."""
        self._text_parts = ["".join(self._text_parts)]  # so that the next call joins only new parts
        return self._text_parts[0]

    def add_token(self, token: int) -> str:
        """Add a token, and return the new text that may be shown; after a stop string, nothing."""
        if self.stopped:
            return ""
        self._num_tokens += 1
        return self._append_text(self._utf8_decoder.decode(self._token_bytes[token]))

    def flush(self) -> str:
        """End the answer, and return the text that was held back."""
        if self.stopped:
            return ""
        rest = self._append_text(self._utf8_decoder.decode(b"", final=True), finished=True)
        held = "" if self.stopped else self._stop_search.flush()
        self._text_parts.append(held)
        return rest + held

    def _append_text(self, text: str, finished: bool = False) -> str:
        text = replace_invalid(text)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        text = self._search_answer(text, finished) if self._splitter else self._search(text)
        self._text_parts.append(text)
        return text

    def _search_answer(self, text: str, finished: bool) -> str:
        """Add text that may be reasoning, which no stop string ends. Returns what is certainly shown."""
        assert self._splitter
        shown = []
        for part, piece in self._splitter.feed(text, finished):
            shown.append(self._search(piece) if part is TextPart.ANSWER else piece)
            if self.stopped:
                break
        return "".join(shown)

    def _search(self, text: str) -> str:
        return self._stop_search.add(text, may_stop=self._num_tokens > self._min_tokens)
