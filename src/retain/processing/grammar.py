"""What an answer may be: a JSON schema, any JSON object, a regular expression, a Lark grammar.

The work is done by llguidance, which knows after every token which ones may follow. What is not known here: who asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from retain.processing.tokenizer import Tokenizer

MAX_SCHEMA_DEPTH = 64  # levels of a schema, at most


class GrammarCompiler:
    """A tokenizer's tokens, as grammars read them: made once, in a second or so."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab`: logits of a row. Raises ValueError where llguidance is not installed."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise ValueError("answers in a form need llguidance: pip install 'retain[serve]'") from None
        self.tokenizer, stops = tokenizer, sorted(tokenizer.stop_token_ids)
        self.vocab_size = vocab_size
        self._ll_tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_TokenizerAdapter(tokenizer, vocab_size)), n_vocab=vocab_size, eos_token=stops or None
        )

    def compile(self, grammar: str) -> GrammarState:
        """A grammar's beginning. Raises ValueError where it is none, or too large."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the form of the answer: {_one_line(matcher.get_error())}")
        return GrammarState(matcher, self.vocab_size)


class GrammarState:
    """One answer's way through a grammar. See engine/request.py."""

    def __init__(self, matcher: LLMatcher, vocab_size: int):
        self._matcher = matcher
        self._bitmask = np.empty((1, -(-vocab_size // 32)), np.int32)

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Make -inf, in place, what may not come next, in logits [K + 1, V]; row i comes behind i of K drafts."""
        tried = 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            self._matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
            allowed = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little")[: len(row)]
            row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device, non_blocking=True), -torch.inf)
            if draft is None or not allowed[draft] or not self._matcher.consume_token(draft):
                break  # what comes behind it will not be asked for
            tried += 1
        if tried:
            self._matcher.rollback(tried)

    def accept_token(self, token: int) -> bool:
        """It came. True: nothing can follow."""
        over: bool = not self._matcher.consume_token(token) or self._matcher.is_stopped()
        return over

    @property
    def failed(self) -> bool:
        """It became too much to follow: what was said so far is not of this form."""
        return bool(self._matcher.is_error())


def grammar_from_json_schema(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON of this schema. Raises ValueError."""
    from llguidance import LLMatcher

    if _exceeds_depth(schema):
        raise ValueError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        raise ValueError(f"the schema: {_one_line(str(error))}") from None


def grammar_from_lark(text: str) -> str:
    """The grammar that a text describes, in llguidance's dialect of Lark. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


class _TokenizerAdapter:
    """What llguidance asks of a tokenizer."""

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
    kids = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return max_depth < 0 or any(_exceeds_depth(kid, max_depth - 1) for kid in kids)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
