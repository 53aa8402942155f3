"""The tokenizer that a GGUF file's metadata describes, built with the `tokenizers` library.

Two kinds: `gpt2`, byte-level BPE with its merges listed, cut first into words as `pre` names it; and `llama`,
SentencePiece BPE, which lists no merges. Those are found once, in seconds for Gemma's 262144 tokens, and kept in
the cache folder. What is not known here: beginnings and ends of texts, templates, decoding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import IO, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from retain.formats.gguf.reader import GGUFReader, UnsupportedError
from retain.models.resolve import atomic_write, get_cache_dir

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; 6 is a byte

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How words are cut before merging, by `tokenizer.ggml.pre`. "" is GPT-2's own rule. SmolLM2 was trained with every
# digit cut off first, which differs for several spaces or newlines before a digit; transformers reads its GGUF by
# GPT-2's rule, and so do we, for the same ids.
PRE_TOKENIZER_PATTERNS: Mapping[str, str] = (
    dict.fromkeys(("default", "gpt-2", "smollm", "mpt", "olmo", "jais", "phi-2", "stablelm2-gpt2", "dolly-v2"), "")
    | dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), LLAMA3_PATTERN)
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_PATTERN)
    | {"tekken": TEKKEN_PATTERN}
)


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer of a GGUF file, adding no bos and no eos. Raises ValueError where the metadata makes no sense."""
    meta = reader.metadata
    tokens, kind = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedError("it holds no tokenizer")
    if kind == "gpt2":
        return _build_byte_level(meta, tokens)
    if kind != "llama":
        raise UnsupportedError(f"tokenizers of type {kind!r} are not supported: only gpt2 and llama are")
    return _load_or_build_sentencepiece(reader, tokens)


def get_token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """The type of every token; NORMAL where the file says nothing."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    return _values_per_token(kinds, tokens) if kinds is not None else [NORMAL] * len(tokens)


def _values_per_token(values: Any, tokens: Sequence[str]) -> list[Any]:
    """An array with one number for each token."""
    if not hasattr(values, "tolist") or len(values) != len(tokens):
        raise ValueError("the tokenizer's lists differ in length")
    return values.tolist()


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZER_PATTERNS:
        raise UnsupportedError(
            f"the pre-tokenizer {pre!r} is not supported: only {', '.join(sorted(PRE_TOKENIZER_PATTERNS))} are"
        )
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in metadata.get("tokenizer.ggml.merges", ()))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, whatever the merges would make of it.
    core = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=PRE_TOKENIZER_PATTERNS[pre] is LLAMA3_PATTERN)
    )
    if PRE_TOKENIZER_PATTERNS[pre]:
        split = pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERNS[pre]), behavior="isolated")
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([split, words])
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    _add_special_tokens(core, tokens, get_token_types(metadata, tokens))
    return core


def _load_or_build_sentencepiece(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """The SentencePiece tokenizer from the cache folder (a checksum, then tokenizer.json), or made and put there."""
    path = get_cache_dir() / "tokenizers" / f"{reader.metadata_digest}.1"  # the number of this way of building
    try:
        kept = path.read_bytes()
        if kept[:32] == hashlib.blake2b(kept[32:], digest_size=32).digest():
            return Tokenizer.from_buffer(kept[32:])
    except Exception:  # not there, not readable, of another version of the library: all one
        pass
    core = _build_sentencepiece(reader.metadata, tokens)
    made = core.to_str().encode()

    def keep(f: IO[bytes]) -> None:
        f.write(hashlib.blake2b(made, digest_size=32).digest())
        f.write(made)

    with suppress(OSError):  # a full disk, a folder that is not ours: it will take as long next time
        atomic_write(path, keep)
    return core


def _build_sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    kinds = get_token_types(metadata, tokens)
    tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = [t for t, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN]
    if "<unk>" in vocabulary:
        unknown.insert(0, "<unk>")
    merges = list(_derive_merges(_tokens_by_rank(metadata, tokens, kinds), vocabulary))
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
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(steps)
    _add_special_tokens(core, tokens, kinds)
    return core


def _tokens_by_rank(metadata: Mapping[str, Any], tokens: list[str], token_types: list[int]) -> list[str]:
    """The tokens that merging makes, the first to be made first: the user's own, then by score."""
    scores = metadata.get("tokenizer.ggml.scores")
    scores = _values_per_token(scores, tokens) if scores is not None else range(0, -len(tokens), -1)
    made = [i for i, kind in enumerate(token_types) if kind in (NORMAL, USER_DEFINED) and len(tokens[i]) > 1]
    return [tokens[i] for i in sorted(made, key=lambda i: (token_types[i] != USER_DEFINED, -scores[i], i))]


def _derive_merges(ranked_tokens: list[str], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The one merge by which each token comes about.

    BPE always merges the pair whose result ranks first. Whatever surrounds a token, the merges inside it are those
    of the token alone, or it would not come about; so the last of them is always the same pair.
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


def _add_special_tokens(core: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    """Tokens that are found in the text as they stand, before anything else: control tokens, and the user's own."""
    pairs = list(zip(tokens, token_types, strict=True))
    core.add_special_tokens([AddedToken(t, normalized=False) for t, kind in pairs if t and kind in (UNKNOWN, CONTROL)])
    core.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED and t.strip("▁")])
