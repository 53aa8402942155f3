"""Load GGUF files into transformers in a fraction of its own time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch


@contextmanager
def fast_gguf_reader() -> Iterator[None]:
    """Parse each GGUF file once, from an ordinary array.

    transformers parses a file for the config, the tokenizer and the weights each. Most of that time goes into slices of
    `np.memmap`, several for each token of the vocabulary.
    """
    open_file, readers = gguf.GGUFReader, {}

    def open_once(path: str | Path) -> Any:
        if path not in readers:
            with patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
                readers[path] = open_file(path)
        return readers[path]

    with patch.object(gguf, "GGUFReader", open_once):
        yield


def load_transformers_model(path: Path) -> Any:
    """Load the model of a GGUF file into transformers, dequantized to float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with fast_gguf_reader():
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )


def load_transformers_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a GGUF file into transformers."""
    from transformers import AutoTokenizer

    with fast_gguf_reader():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
