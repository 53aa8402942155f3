"""Tokenizers that tests share: those of the bundled models, and small ones of each kind."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retain.models.resolve import resolve_model
from retain.processing.tokenizer import Tokenizer
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, SENTENCEPIECE_VOCABULARY, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint

BUNDLED = ["smollm2", "gemma3"]
SMALL_VOCABULARIES: dict[str, dict[str, Any]] = {
    "bytes": BYTE_LEVEL_VOCABULARY,
    "sentencepiece": SENTENCEPIECE_VOCABULARY,
    "unspaced": {**SENTENCEPIECE_VOCABULARY, "tokenizer.ggml.add_space_prefix": False},
}


@cache
def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer of BUNDLED or SMALL_VOCABULARIES once in each process."""
    if name in BUNDLED:
        return Tokenizer.open(resolve_model(name))
    with TemporaryDirectory() as folder:
        return Tokenizer.open(write_tokenizer_file(Path(folder), SMALL_VOCABULARIES[name]))


def write_tokenizer_file(folder: Path, vocabulary: dict[str, Any], extra: dict[str, Any] | None = None) -> Path:
    """Write a GGUF file with this vocabulary. `extra` replaces metadata; None removes a key."""
    return write_gguf(folder / "m.gguf", tiny_checkpoint("llama"), vocabulary=vocabulary, extra=extra)
