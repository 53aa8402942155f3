"""Grammars that answers must match: JSON schemas, JSON objects, regular expressions, Lark grammars.

The llguidance library computes, after every token, which tokens may follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retain.processing.tokenizer import Tokenizer

if TYPE_CHECKING:  # an optional dependency
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_DEPTH = 64
INVALID_GRAMMAR = "the grammar is invalid, or uses a feature that is not supported"
# By what llguidance's message contains. Its own words quote the grammar and name its parts, so no client gets them.
REASONS = {
    "Unimplemented": "the grammar uses a part of JSON Schema that is not supported",
    "Unsatisfiable": "the grammar matches no text",
    "regex": "the grammar has a regular expression that is invalid or not supported",
    "too big": "the grammar is too large",
    "too large": "the grammar is too large",
    "limit": "the grammar is too large",
}


class GrammarCompiler:
    """Compile grammars for a tokenizer's tokens. Created once for each model; takes about a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size`: logits in a row, V. Raises ValueError where llguidance is not installed."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise ValueError("structured outputs need llguidance: pip install 'retain[serve]'") from None
        self.tokenizer, stops = tokenizer, sorted(tokenizer.stop_token_ids)
        self.vocab_size = vocab_size
        self._ll_tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_TokenizerAdapter(tokenizer, vocab_size)), n_vocab=vocab_size, eos_token=stops or None
        )

    def compile(self, grammar: str) -> GrammarState:
        """Return the start state of a grammar. Raises ValueError when it is invalid or too large."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(explain_error(matcher.get_error()))
        return GrammarState(matcher, self.vocab_size)


class GrammarState:
    """The progress of one answer through a grammar (see retain.engine.grammar)."""

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher = matcher
        self._bitmask = np.empty((1, -(-vocab_size // 32)), np.int32)

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Set logits [K + 1, V] of tokens that may not follow to -inf, in place; row i is after i of K drafts."""
        num_accepted = 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            self._matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
            allowed = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little")[: len(row)]
            row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device, non_blocking=True), -torch.inf)
            if draft is None or not allowed[draft] or not self._matcher.consume_token(draft):
                break  # verification rejects this draft, so it never uses the rows after it
            num_accepted += 1
        if num_accepted:
            self._matcher.rollback(num_accepted)

    def accept_token(self, token: int) -> bool:
        """Advance by a sampled token. Returns whether the answer is complete, so that no token can follow."""
        return bool(not self._matcher.consume_token(token) or self._matcher.is_stopped())

    @property
    def failed(self) -> bool:
        """Return whether the matcher gave up, for example at a limit: the answer may not match the grammar."""
        return bool(self._matcher.is_error())


def grammar_from_json_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of a JSON schema. Raises ValueError for an invalid or too deeply nested schema."""
    from llguidance import LLMatcher

    if _exceeds_depth(schema):
        raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        raise ValueError(explain_error(str(error))) from None


def grammar_from_lark(text: str) -> str:
    """Return the grammar of a text in llguidance's dialect of Lark. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def explain_error(message: str) -> str:
    """Return the reason of an error of llguidance, in words of our own."""
    return next((reason for found, reason in REASONS.items() if found in message), INVALID_GRAMMAR)


class _TokenizerAdapter:
    """The tokenizer interface that llguidance requires."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_token_ids, default=0)
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(
            text if isinstance(text, str) else text.decode(errors="replace"), add_special_tokens=False
        )


def _exceeds_depth(x: Any, max_depth: int = MAX_SCHEMA_DEPTH) -> bool:
    children = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return max_depth < 0 or any(_exceeds_depth(child, max_depth - 1) for child in children)
