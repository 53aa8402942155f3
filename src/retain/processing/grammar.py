"""Grammars that answers must match: JSON schemas, JSON objects, regular expressions, Lark grammars.

The llguidance library computes, after every token, which tokens may follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.transfers import to_device
from retain.plugins import needs_extra
from retain.processing.lark import name_special_token
from retain.processing.reasoning_limit import ReasoningLimit
from retain.processing.schemas.annotations import drop_annotations
from retain.processing.schemas.exact_grammar import build_exact_grammar
from retain.processing.schemas.json_schema import Schema, drop_unmatchable
from retain.processing.schemas.parts import SchemaError, find_place_beyond
from retain.processing.schemas.refusals import explain_refusal
from retain.processing.schemas.width import MAX_WIDTH, WAYS_PER_OPTIONAL_PROPERTY, find_part_that_is_too_wide
from retain.processing.tokenizer import Tokenizer

if TYPE_CHECKING:  # an optional dependency
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_DEPTH = 64
JSON_SCHEMA = "%json "  # in a Lark grammar
INVALID_GRAMMAR = "the grammar is invalid, or uses a feature that is not supported"
# By what llguidance's message contains. Its own words quote the grammar and name its parts, so no client gets them.
MATCHES_NOTHING = "the grammar matches no text"
DEAD_END = "the grammar allows no further token"
TOO_COMPLEX = "the grammar is too complex: simplify it"
TOO_WIDE = (
    f"an object with more than {MAX_WIDTH // WAYS_PER_OPTIONAL_PROPERTY - 1} optional properties, or a "
    f"choice of more than {MAX_WIDTH - 1}: simplify it"
)
REASONS = {
    "Unsatisfiable": MATCHES_NOTHING,
    "NoExtension": MATCHES_NOTHING,
    "regex": "the grammar has a regular expression that is invalid or not supported",
    "too big": "the grammar is too large",
    "too large": "the grammar is too large",
    "limit": "the grammar is too large",
}


class GrammarCompiler:
    """Compile grammars for a tokenizer's tokens. Created once for each model; takes about a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """`vocab_size`: logits in a row, V. Raises ValueError where llguidance is not installed."""
        with needs_extra("a grammar", "serve"):
            from llguidance import LLTokenizer, TokenizerWrapper
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        adapter = _TokenizerAdapter(tokenizer, vocab_size)
        stops = sorted(tokenizer.stop_token_ids) or [adapter.eos_token_id]
        self._ll_tokenizer: LLTokenizer = LLTokenizer(
            TokenizerWrapper(adapter), n_vocab=len(adapter.tokens), eos_token=stops
        )

    def compile(self, grammar: str) -> GrammarState:
        """Return the start state of a grammar. Raises ValueError when it is invalid, too large or matches no text."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        state = GrammarState(matcher, self.vocab_size, self._ll_tokenizer.vocab_size)
        can_start = not matcher.is_error() and state.allowed_tokens().any()
        if matcher.is_error() or not can_start:
            raise explain_error(grammar, matcher.get_error()) if matcher.is_error() else ValueError(MATCHES_NOTHING)
        return state


class GrammarState:
    """The progress of one answer through a grammar (see retain.engine.grammar).

    `reasoning_limit`: of the reasoning that the grammar allows before what it demands.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, num_known: int, reasoning_limit: ReasoningLimit | None = None
    ):
        """`num_known`: tokens that the matcher knows, at least those of the vocabulary."""
        self.reasoning_limit = reasoning_limit
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_known = num_known
        self._bitmask = np.empty((1, -(-num_known // 32)), np.int32)

    def copy(self) -> GrammarState:
        """Return the same state for another answer. Compiling the grammar again may take seconds."""
        limit = self.reasoning_limit and self.reasoning_limit.copy()
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._num_known, limit)

    def allowed_tokens(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, [V]. None may after a matcher's error."""
        self._matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
        allowed = np.unpackbits(self._bitmask.view(np.uint8), count=self._vocab_size, bitorder="little") != 0
        forced = self.reasoning_limit.next_token if self.reasoning_limit else None
        if forced is not None and allowed[forced]:  # not in the middle of a character
            allowed[:] = False
            allowed[forced] = True
        return allowed & (not self._matcher.is_error())  # llguidance allows the end of the text then

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Set logits [K + 1, V] of tokens that may not follow to -inf, in place; row i is after i of K drafts.

        A row of which no token could be sampled stays as it is: `accept_token` refuses whatever is sampled from it.
        """
        state = self.copy() if drafts else self  # errors are final, and drafts may be wrong
        for row, draft in zip(logits, [*drafts, None], strict=True):
            allowed = state.allowed_tokens()
            masked = row.masked_fill(to_device(torch.from_numpy(~allowed), row.device), -torch.inf)
            if masked.max() == -torch.inf:
                break
            row.copy_(masked)
            if draft is None or not allowed[draft] or not state.accept_token(draft):
                break  # verification rejects this draft, so it never uses the rows after it

    def accept_token(self, token: int) -> bool:
        """Advance by a sampled token. Returns whether it may follow."""
        if self.reasoning_limit:
            self.reasoning_limit.accept_token(token)
        return bool(self._matcher.consume_token(token))

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the grammar, and no token can follow."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    @property
    def error(self) -> str:
        """Why a token was refused, in words of our own: a dead end, or a limit of the matcher."""
        message = self._matcher.get_error()
        is_dead_end = not message or "NoExtension" in message or "doesn't satisfy" in message
        return DEAD_END if is_dead_end else TOO_COMPLEX


def grammar_from_json_schema(schema: Schema) -> str:
    """Return the grammar of a JSON schema. Raises ValueError for an invalid, too deep or unmatchable schema."""
    from llguidance import LLMatcher

    prepared = _prepare(schema)
    if text := _build_exact(prepared):
        return grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(prepared))
    except ValueError as error:
        raise explain_refusal(prepared, str(error)) from None


def lark_json_rule(name: str, schema: Schema) -> str:
    """Return a rule of a Lark grammar for the texts of a JSON schema, which stays a document of its own.

    So its references keep their meaning: they are to its own root. Raises ValueError as `grammar_from_json_schema`.
    """
    prepared = _prepare(schema)
    text = _build_exact(prepared)
    return f"{name}: %lark {{\n{text}\n}}" if text else f"{name}: {JSON_SCHEMA}{json.dumps(prepared)}"


def _build_exact(schema: Schema) -> str | None:
    return build_exact_grammar(schema) if isinstance(schema, dict) else None


def _prepare(schema: Schema) -> Schema:
    """Return a schema as it is compiled: without what changes nothing, and without what no value matches."""
    if place := find_place_beyond(schema, MAX_SCHEMA_DEPTH):
        raise SchemaError(place, f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")
    plain = json.loads(json.dumps(schema))
    if isinstance(plain, dict):
        drop_annotations(plain)
        if place := find_part_that_is_too_wide(plain):
            raise SchemaError(place, TOO_WIDE)
    matchable = drop_unmatchable(plain)
    if matchable is False:
        raise explain_refusal(plain, "Unsatisfiable")
    return matchable


def grammar_from_lark(text: str) -> str:
    """Return the grammar of a text in llguidance's dialect of Lark. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


def explain_error(grammar: str, message: str) -> ValueError:
    """Return the error of a grammar that llguidance refuses with a message, in words of our own."""
    schemas = list(_iter_schemas(grammar))
    errors = (explain_refusal(schema, message) for schema in schemas)
    located = next((error for error in errors if not error.is_of_whole), None)
    if located:
        return located
    if len(schemas) == 1:
        return explain_refusal(schemas[0], message)
    return ValueError(next((reason for found, reason in REASONS.items() if found in message), INVALID_GRAMMAR))


def _iter_schemas(grammar: str) -> Iterator[Any]:
    """Yield the JSON schemas in a grammar."""
    with suppress(ValueError):  # as llguidance writes the grammar of one schema
        yield from (part["json_schema"] for part in json.loads(grammar)["grammars"])
        return
    for text in grammar.split(JSON_SCHEMA)[1:]:
        with suppress(ValueError):
            yield json.JSONDecoder().raw_decode(text)[0]


class _TokenizerAdapter:
    """The tokenizer interface that llguidance requires."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        for i in self.special_token_ids:
            self.tokens[i] = name_special_token(self.tokens[i].decode(errors="replace")).encode()
        self.eos_token_id = min(tokenizer.stop_token_ids, default=vocab_size)
        if self.eos_token_id == vocab_size:  # no token ends a text: one is added that no model can write
            self.tokens.append(b"<|end of the text|>")
            self.special_token_ids.append(vocab_size)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens that write a text in the middle of an answer, byte for byte; up to a byte that none writes."""
        data = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode_continuation(data.decode(errors="replace"))
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._match_longest(data)

    def _match_longest(self, data: bytes) -> list[int]:
        ids: list[int] = []
        begin = 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._max_length), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._ids_by_bytes), None)
            if end is None:
                break
            ids.append(self._ids_by_bytes[data[begin:end]])
            begin = end
        return ids

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _max_length(self) -> int:
        return max(map(len, self._ids_by_bytes), default=0)
