"""Load GGUF files into transformers in a fraction of its own time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch


@contextmanager
def fast_gguf_reader() -> Iterator[None]:
    """Parse each GGUF file once, from an ordinary array, and nothing of it several times.

    transformers parses a file for the config, the tokenizer and the weights each. Most of that time goes into slices of
    `np.memmap`, several for each token of the vocabulary, and into the names of tensors, anew for each module.
    """
    from transformers import modeling_gguf_pytorch_utils

    open_file, readers, get_parts = gguf.GGUFReader, {}, gguf.GGUFReader._get_field_parts

    def open_once(path: str | Path) -> Any:
        if path not in readers:
            with patch.object(np, "memmap", lambda path, mode: np.fromfile(path, np.uint8)):
                readers[path] = open_file(path)
        return readers[path]

    def get_field_parts(reader: Any, start: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        found = read_array(reader, start) if raw_type == gguf.GGUFValueType.ARRAY else None
        return found or get_parts(reader, start, raw_type)

    with ExitStack() as patches:
        for owner, name, value in (
            (gguf, "GGUFReader", open_once),
            (open_file, "_get_field_parts", get_field_parts),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            (modeling_gguf_pytorch_utils, "_gguf_parse_value", parse_value),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


def read_array(reader: Any, start: int) -> tuple[int, list[Any], list[int], list[Any]] | None:
    """Return what GGUFReader._get_field_parts gives for an array, less the lengths of strings; None if it is empty."""
    item_type, count = reader._get(start, np.uint32), reader._get(start + 4, np.uint64)
    kind, n, offset = gguf.GGUFValueType(item_type[0]), int(count[0]), start + 12
    items: list[Any] = []
    if kind == gguf.GGUFValueType.STRING:
        for _ in range(n):
            end = offset + 8 + int.from_bytes(reader.data[offset : offset + 8].tobytes(), "little")
            items.append(reader.data[offset + 8 : end])
            offset = end
    elif dtype := reader.gguf_scalar_to_np.get(kind):
        numbers = reader._get(offset, dtype, n)
        items, offset = list(numbers[:, None]), offset + numbers.nbytes
    if not items:
        return None
    return offset - start, [item_type, count, *items], list(range(2, 2 + n)), [gguf.GGUFValueType.ARRAY, kind]


def parse_value(value: np.ndarray, types: list[Any]) -> Any:
    """Return a string or number of a field, as transformers does."""
    return value.tobytes().decode() if types[-1] == gguf.GGUFValueType.STRING else value[0].item()


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
