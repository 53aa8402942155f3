"""Offsets of tokens in a text: where what each of them contributes begins.

A token that is not shown contributes nothing where it stands. Of a character that is split into several tokens, the
last contributes all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from retain.processing.tokenizer import Tokenizer


class TextOffsets:
    """Finds the offset of each token of a text that grows, `start` characters after the text of `preceding` tokens."""

    def __init__(self, tokenizer: Tokenizer, preceding: Sequence[int] = (), start: int = 0):
        self._detokenizer = tokenizer.create_detokenizer(preceding=preceding)
        self.length = start

    def add_token(self, token: int) -> int:
        """Add a token, and return its offset in characters."""
        offset = self.length
        self.length += len(self._detokenizer.add_token(token))
        return offset


class EchoedPrompt(NamedTuple):
    """A prompt as an answer repeats it: its text, and the offset of each of its tokens."""

    token_ids: Sequence[int]
    text: str
    offsets: Sequence[int]


def echo_text(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> EchoedPrompt:
    """Return a prompt that was sent as text: it stays as it is, whatever its tokens show."""
    return EchoedPrompt(token_ids, text, tokenizer.find_offsets(text))


def echo_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], is_whole_text: bool) -> EchoedPrompt:
    """Return a prompt that was sent as token ids: the text that they show.

    A character that is incomplete at the end is left to the answer, unless the prompt `is_whole_text`.
    """
    detokenizer = tokenizer.create_detokenizer()
    length = 0
    offsets: list[int] = []
    for token in token_ids:
        offsets.append(length)
        length += len(detokenizer.add_token(token))
    if is_whole_text:
        detokenizer.flush()
    return EchoedPrompt(token_ids, detokenizer.text, offsets)
