"""Build the tokenizer in a GGUF file's metadata with the `tokenizers` library.

There are two kinds. `gpt2` is byte-level BPE: the file lists its merges, and `pre` names the rule that splits text into
words. `llama` is SentencePiece BPE without listed merges, `gemma4` the same with them. Deriving them takes seconds for
Gemma's 262144 tokens, so the result is cached on disk.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from retain.files import atomic_write, get_cache_dir, quote
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.reader import GGUFReader

# Token types in GGUF; 6 is a byte.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
ADDED_TYPES = (UNKNOWN, CONTROL, USER_DEFINED)
CACHE_VERSION = 2  # changes when the same metadata gives another tokenizer
PRE_TOKENIZERS = Path(__file__).with_name("pre_tokenizers.toml")
# Added tokens of Phi-3 that keep the white space behind them; all others swallow it.
PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")
SENTENCEPIECE_MODELS = ("llama", "gemma4")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words: by one pattern after another."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # where the file does not say


@cache
def read_pre_tokenizers() -> Mapping[str, PreTokenizer]:
    """Return the rules by their names in GGUF files."""
    found: dict[str, PreTokenizer] = {}
    for rule in tomllib.loads(PRE_TOKENIZERS.read_text(encoding="utf-8"))["rules"]:
        patterns = tuple("".join(pattern) for pattern in rule.pop("patterns"))
        found |= dict.fromkeys(rule.pop("names"), PreTokenizer(patterns, **rule))
    return found


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Return the tokenizer of a GGUF file; it adds no bos and no eos. Raises ValueError for invalid metadata."""
    meta = reader.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    model = meta.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedError("the file has no tokenizer")
    if model == "gpt2":
        return _build_byte_level(meta, tokens)
    if model not in SENTENCEPIECE_MODELS:
        known = ", ".join(("gpt2", *SENTENCEPIECE_MODELS))
        raise UnsupportedError(f"tokenizers of type {quote(model)} are not supported: only {known} are")
    return _load_or_build_sentencepiece(reader, tokens)


def lists_merges(metadata: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer is Gemma 4's, whose scores say nothing. Some files of that family call it llama."""
    model = metadata.get("tokenizer.ggml.model")
    is_renamed = model == "llama" and metadata.get("general.architecture") == "gemma4"
    return model == "gemma4" or (is_renamed and "tokenizer.ggml.merges" in metadata)


def get_token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Return the type of each token; NORMAL where the file lists none."""
    types = metadata.get("tokenizer.ggml.token_type")
    return _values_per_token(types, tokens) if types is not None else [NORMAL] * len(tokens)


def _values_per_token(values: Any, tokens: Sequence[str]) -> list[Any]:
    """Return a metadata array as a list with a number for each token. Raises ValueError."""
    if not hasattr(values, "tolist") or len(values) != len(tokens):
        raise ValueError("the tokenizer's lists differ in length")
    return values.tolist()


def _listed_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(a, b) for a, _, b in (m.partition(" ") for m in metadata.get("tokenizer.ggml.merges", ()))]


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rules = read_pre_tokenizers()
    if pre not in rules:
        raise UnsupportedError(f"the pre-tokenizer {quote(pre)} is not supported: only {', '.join(sorted(rules))} are")
    merges = _listed_merges(metadata)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    rule = rules[pre]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    core.decoder = decoders.ByteLevel()
    _add_special_tokens(core, tokens, get_token_types(metadata, tokens), swallowing=False)
    return core


def _load_or_build_sentencepiece(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """Load the SentencePiece tokenizer from the cache folder, or build and cache it.

    The cached file is a checksum, then tokenizer.json.
    """
    path = get_cache_dir() / "tokenizers" / f"{reader.metadata_digest}.{CACHE_VERSION}"
    with suppress(Exception):  # missing, unreadable, or written by another version of the library
        cached = path.read_bytes()
        if cached[:32] == hashlib.blake2b(cached[32:], digest_size=32).digest():
            return Tokenizer.from_buffer(cached[32:])
    core = _build_sentencepiece(reader.metadata, tokens)
    data = core.to_str().encode()
    with suppress(OSError):  # disk full or no permission: the next start builds it again
        atomic_write(path, methodcaller("write", hashlib.blake2b(data, digest_size=32).digest() + data))
    return core


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    types = get_token_types(metadata, tokens)
    tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = [t for t, token_type in zip(tokens, types, strict=True) if token_type == UNKNOWN]
    if "<unk>" in vocabulary:
        unknown.insert(0, "<unk>")
    has_listed_merges = lists_merges(metadata)
    if has_listed_merges:
        merges = _listed_merges(metadata)
    else:
        merges = list(_derive_merges(_tokens_by_rank(metadata, tokens, types), vocabulary))
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_space = metadata.get("tokenizer.ggml.add_space_prefix", not has_listed_merges)
    is_phi3 = metadata.get("general.architecture") == "phi3"
    if adds_space and not is_phi3:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:  # Phi-3 adds the space to every part between control tokens, even if it begins with one
        prepend = [normalizers.Prepend("▁")] if adds_space else []
        core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1))
    core.decoder = decoders.Sequence(steps)
    _add_special_tokens(core, tokens, types, swallowing=is_phi3)
    return core


def _tokens_by_rank(metadata: Mapping[str, Any], tokens: list[str], token_types: list[int]) -> list[str]:
    """Return the tokens that merges produce, in the order of merging: user-defined tokens first, then by score."""
    scores = metadata.get("tokenizer.ggml.scores")
    scores = _values_per_token(scores, tokens) if scores is not None else range(0, -len(tokens), -1)
    merged = [i for i, t in enumerate(token_types) if t in (NORMAL, USER_DEFINED) and len(tokens[i]) > 1]
    return [tokens[i] for i in sorted(merged, key=lambda i: (token_types[i] != USER_DEFINED, -scores[i], i))]


def _derive_merges(ranked_tokens: list[str], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield for each token the one merge that produces it.

    BPE always merges the pair whose result ranks first. If a token is produced at all, the merges inside it are the
    same in any context as in the token alone, so the last of them is always the same pair.
    """
    rank = {token: i for i, token in enumerate(ranked_tokens)}
    never = len(ranked_tokens)
    for token in ranked_tokens:
        parts = list(token)
        while len(parts) > 2:
            ranks = [rank.get(a + b, never) for a, b in pairwise(parts)]
            best = min(ranks)
            if best == never:
                break
            i = ranks.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2 and parts[0] in vocabulary and parts[1] in vocabulary:
            yield parts[0], parts[1]


def _add_special_tokens(core: Tokenizer, tokens: list[str], token_types: list[int], swallowing: bool) -> None:
    """Add control and user-defined tokens, which match the text as they are, before it is split into words.

    `swallowing`: those of Phi-3, most of which take the white space behind them with them.
    """
    special = []
    user_defined = []
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type not in ADDED_TYPES:
            continue
        added = AddedToken(token, normalized=False, rstrip=swallowing and token not in PHI3_KEEPING)
        if token and token_type in (UNKNOWN, CONTROL):
            special.append(added)
        elif token_type == USER_DEFINED and token.strip("▁"):
            user_defined.append(added)
    core.add_special_tokens(special)
    core.add_tokens(user_defined)
