"""Build the tokenizer in a GGUF file's metadata with the `tokenizers` library.

There are two kinds. `gpt2` is byte-level BPE: the file lists its merges, and `pre` names the rule that splits text into
words. `llama` is SentencePiece BPE without listed merges, `gemma4` the same with them. Deriving them takes seconds for
Gemma's 262144 tokens, so the result is cached on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import methodcaller
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

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35_PATTERN = QWEN2_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
SEED_PATTERN = QWEN2_PATTERN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VIKING_PATTERN = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_PATTERN = r"\p{Han}+|" + GPT4O_PATTERN.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]", r"[\r\n]")
YOUTU_PATTERNS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    GPT4O_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
)
# One after another: numbers of three digits, Chinese and Japanese, and words.
DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def write_class(ranges: str) -> str:
    """Return the inside of a class of characters from ranges of their numbers in hexadecimal."""
    bounds = ([chr(int(number, 16)) for number in part.split("-")] for part in ranges.split())
    return "".join(f"{bound[0]}-{bound[-1]}" for bound in bounds)


# Letters with a case, but not all of them.
DEEPSEEK_LETTERS = write_class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943 "
)
DEEPSEEK_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM_PATTERNS = (
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    rf"\s?[{write_class('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    DEEPSEEK_CHINESE,
    r"\p{N}+",
)
DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CHINESE, r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words: by one pattern after another."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # where the file does not say


GPT2 = PreTokenizer((GPT2_PATTERN,))
DIGITS = PreTokenizer((r"\p{N}", GPT2_PATTERN))  # each digit apart
LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), ignore_merges=True, adds_bos=True)
CL100K = PreTokenizer((LLAMA3_PATTERN,))  # of GPT-4
QWEN2 = PreTokenizer((QWEN2_PATTERN,))
# By `tokenizer.ggml.pre`, after llama.cpp's src/llama-vocab.cpp. SmolLM2 was trained with each digit split off, which
# differs for several spaces or newlines before a digit. transformers reads its GGUF file with GPT-2's rule; this table
# does too, for equal ids. Models that use a name are in a comment where it is another's.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = (
    dict.fromkeys(("default", "gpt-2", "smollm", "mpt", "olmo", "jais", "phi-2", "stablelm2-gpt2", "dolly-v2"), GPT2)
    | dict.fromkeys(("granite-docling", "trillion", "a.x-4.0", "mellum", "gigachat"), GPT2)
    | dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "minerva-7b"), DIGITS)  # refact: Granite 3
    | dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), LLAMA3)
    | dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), CL100K)  # dbrx: Olmo 2, Phi-4; smaug: SmolLM3
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "solar-open"), QWEN2)
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), PreTokenizer((GPT4O_PATTERN,)))  # gpt-oss, Phi-4 mini
    | dict.fromkeys(("deepseek-v3", "joyai-llm"), PreTokenizer(DEEPSEEK3_PATTERNS))
    | dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O_PATTERN)))
    | {
        "deepseek-llm": PreTokenizer(DEEPSEEK_LLM_PATTERNS),  # DeepSeek-V2
        "deepseek-coder": PreTokenizer(DEEPSEEK_CODER_PATTERNS),
        "kimi-k2": PreTokenizer((KIMI_PATTERN,)),  # of the architecture deepseek2, as the next one
        "youtu": PreTokenizer(YOUTU_PATTERNS, ignore_merges=True),
        "viking": PreTokenizer((VIKING_PATTERN, r"\p{N}")),
        "qwen35": PreTokenizer((QWEN35_PATTERN,)),
        "seed-coder": PreTokenizer((SEED_PATTERN,)),
        "tekken": PreTokenizer((TEKKEN_PATTERN,), ignore_merges=True, adds_bos=True),
    }
)
# Added tokens of Phi-3 that keep the white space behind them; all others swallow it.
PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")


SENTENCEPIECE_MODELS = ("llama", "gemma4")


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
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"the pre-tokenizer {quote(pre)} is not supported: only {', '.join(sorted(PRE_TOKENIZERS))} are"
        )
    merges = _listed_merges(metadata)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    rule = PRE_TOKENIZERS[pre]
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
