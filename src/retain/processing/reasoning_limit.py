"""A limit of the reasoning before a structured output, so that the output is reached (vLLM: thinking token budget)."""

from __future__ import annotations

from copy import copy

from retain.processing.reasoning import Reasoning
from retain.processing.tokenizer import Tokenizer


class ReasoningLimit:
    """Ends the reasoning of one answer: after a number of its tokens only those of its end mark may follow."""

    def __init__(self, reasoning: Reasoning, num_tokens: int, tokenizer: Tokenizer):
        self._splitter = reasoning.create_splitter()
        self._num_left = num_tokens
        self._end_tokens = tokenizer.encode_continuation(reasoning.marks.end)
        self._num_written = 0  # of the end tokens
        self._tokenizer = tokenizer

    def copy(self) -> ReasoningLimit:
        """Return the same limit for another answer."""
        other = copy(self)
        other._splitter = self._splitter.copy()
        return other

    @property
    def next_token(self) -> int | None:
        """The token that must follow, if the limit is reached."""
        is_over = self._splitter.is_in_reasoning and self._num_left <= 0
        return self._end_tokens[self._num_written % len(self._end_tokens)] if is_over else None

    def accept_token(self, token: int) -> None:
        """Count a token of the answer."""
        if self._splitter.is_in_answer:
            return
        self._num_written = self._num_written + 1 if token == self.next_token else 0
        if self._splitter.is_in_reasoning:
            self._num_left -= 1
        self._splitter.feed(self._tokenizer.token_bytes(token).decode(errors="replace"), finished=False)
