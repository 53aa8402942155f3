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

    from retain.text.tokenizer import Tokenizer

DEEP = 64  # levels of a schema, at most


class Words:
    """A tokenizer's tokens, as grammars read them: made once, in a second or so."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        """`vocab`: logits of a row. Raises ValueError where llguidance is not installed."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise ValueError("answers in a form need llguidance: pip install 'retain[serve]'") from None
        self.tokenizer, stops = tokenizer, sorted(tokenizer.stop_ids)
        self.vocab = vocab
        self._known: LLTokenizer = LLTokenizer(
            TokenizerWrapper(_Wrapped(tokenizer, vocab)), n_vocab=vocab, eos_token=stops or None
        )

    def form(self, grammar: str) -> Form:
        """A grammar's beginning. Raises ValueError where it is none, or too large."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the form of the answer: {_line(matcher.get_error())}")
        return Form(matcher, self.vocab)


class Form:
    """One answer's way through a grammar. See engine/request.py."""

    def __init__(self, matcher: LLMatcher, vocab: int):
        self._matcher = matcher
        self._bits = np.empty((1, -(-vocab // 32)), np.int32)

    def allow(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Make -inf, in place, what may not come next, in logits [K + 1, V]; row i comes behind i of K drafts."""
        tried = 0
        for row, draft in zip(logits, [*drafts, None], strict=True):
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(row)]
            row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device, non_blocking=True), -torch.inf)
            if draft is None or not allowed[draft] or not self._matcher.consume_token(draft):
                break  # what comes behind it will not be asked for
            tried += 1
        if tried:
            self._matcher.rollback(tried)

    def push(self, token: int) -> bool:
        """It came. True: nothing can follow."""
        over: bool = not self._matcher.consume_token(token) or self._matcher.is_stopped()
        return over

    @property
    def broken(self) -> bool:
        """It became too much to follow: what was said so far is not of this form."""
        return bool(self._matcher.is_error())


def schema(wanted: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON of this schema. Raises ValueError."""
    from llguidance import LLMatcher

    if _deep(wanted):
        raise ValueError(f"the schema is nested more than {DEEP} deep")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(wanted))
    except ValueError as error:
        raise ValueError(f"the schema: {_line(str(error))}") from None


def lark(text: str) -> str:
    """The grammar that a text describes, in llguidance's dialect of Lark. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.stop_ids, default=0)
        self.tokens = [tokenizer.piece(i) for i in range(vocab)]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"), ends=False)


def _deep(x: Any, most: int = DEEP) -> bool:
    kids = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return most < 0 or any(_deep(kid, most - 1) for kid in kids)


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
