"""Tokenizers that tests share: those of the bundled models, and small ones of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from retain.models.resolve import resolve_model
from retain.processing.tokenizer import Tokenizer
from tests.helpers.gguf_files import (
    BYTE_LEVEL_VOCABULARY,
    SENTENCEPIECE_PIECES,
    SENTENCEPIECE_TOKENS,
    SENTENCEPIECE_VOCABULARY,
    write_gguf,
)
from tests.helpers.tiny_models import tiny_checkpoint

END = "<|end of the text|>"
BUNDLED = ["smollm2", "gemma3"]
SMALL_VOCABULARIES: dict[str, dict[str, Any]] = {
    "bytes": BYTE_LEVEL_VOCABULARY,
    "sentencepiece": SENTENCEPIECE_VOCABULARY,
    "unspaced": {**SENTENCEPIECE_VOCABULARY, "tokenizer.ggml.add_space_prefix": False},
}


def build_llama_folder_core() -> Core:
    """Build SentencePiece BPE as a folder of Llama 2 has it: a normalizer writes the first space."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(SENTENCEPIECE_TOKENS))}
    merges = [("▁", "t"), ("t", "h"), ("th", "e"), ("▁", "c"), ("c", "a"), ("a", "t"), ("▁", "s")]
    core = Core(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return _with_bos(core)


def build_unigram_core() -> Core:
    """Build a unigram tokenizer, whose decoder strips the space that its pre-tokenizer writes."""
    pieces = ["<unk>", "<s>", "</s>", *SENTENCEPIECE_PIECES, *"▁thecasoxlwrdn.,éu</>"]
    scores = [(piece, -1.0 - i / 10) for i, piece in enumerate(dict.fromkeys(pieces))]
    core = Core(models.Unigram(scores, unk_id=0, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with_bos(core)


def build_byte_core(special_tokens: Sequence[str] = ()) -> Core:
    """Build a tokenizer whose tokens are the bytes, an end of text and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (END, *special_tokens)])
    return core


def _with_bos(core: Core) -> Core:
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return core


FOLDER_TOKENIZERS: dict[str, Callable[[], Core]] = {
    "llama-folder": build_llama_folder_core,
    "unigram": build_unigram_core,
}


@cache
def open_byte_tokenizer(special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """Open a tokenizer of bytes and of special tokens."""
    with TemporaryDirectory() as folder:
        build_byte_core(special_tokens).save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(f'{{"eos_token": "{END}"}}')
        return Tokenizer.open(Path(folder))


@cache
def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer of BUNDLED, SMALL_VOCABULARIES or FOLDER_TOKENIZERS once in each process."""
    if name in BUNDLED:
        return Tokenizer.open(resolve_model(name))
    with TemporaryDirectory() as folder:
        if name in FOLDER_TOKENIZERS:
            FOLDER_TOKENIZERS[name]().save(f"{folder}/tokenizer.json")
            return Tokenizer.open(Path(folder))
        return Tokenizer.open(write_tokenizer_file(Path(folder), SMALL_VOCABULARIES[name]))


def write_tokenizer_file(folder: Path, vocabulary: dict[str, Any], extra: dict[str, Any] | None = None) -> Path:
    """Write a GGUF file with this vocabulary. `extra` replaces metadata; None removes a key."""
    size = max(128, len(vocabulary["tokenizer.ggml.tokens"]))
    return write_gguf(folder / "m.gguf", tiny_checkpoint("llama", vocab_size=size), vocabulary=vocabulary, extra=extra)
