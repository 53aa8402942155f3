"""The tensors of one model under their Hugging Face names, read from whatever file holds them.

Tensors are of one dtype; matrices stay quantised, or become so, as is chosen. A source is a file format: models/gguf/
or models/folder.py. It has `config` (what config.json says), `names()`, `read(name)` and `quanta(name)`. Nothing is
unpickled. What is not known here: what the tensors mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from retain.config import check_weights
from retain.kernels.quantized import Int4, Int8, QuantizedWeight, Weight, is_quantizable, quantize_int4, quantize_int8


class Checkpoint(Protocol):
    """One file format, one model. Files are memory-mapped; a tensor costs memory when it is read."""

    config: dict[str, Any]

    def names(self) -> Set[str]:
        """The Hugging Face names of all tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised; float32, float16 or bfloat16. Raises ValueError when the file is damaged."""
        ...

    def read_quantized(self, name: str, transposed: bool = False) -> QuantizedWeight | None:
        """The quanta [out, in] of a matrix that is quantised in the file, else None. `transposed`: `read` is [in, out].

        Raises ValueError when the file is damaged.
        """
        ...


class Weights:
    """`w["model.norm.weight"]` is a tensor of `dtype`; `"lm_head.bias" in w`; `w.at("model.layers.3.")` is a part.

    `w.matrix("lm_head.weight")` is of the kind that `weights` says: auto (as the file has it, dense where that is not
    quantised), bf16 (dense), int8, or int4 (embeddings and heads int8). What is dense is of `dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        quantization: str = "auto",
        prefix: str = "",
        on_read: Callable[[int], None] = lambda n: None,
        vector_dtype: torch.dtype | None = None,
    ):
        """`read` is told the number of elements after every tensor that was read (for a progress bar).

        `vectors`: what is not a matrix is of another dtype.
        """
        self.checkpoint, self.dtype, self.quantization, self.prefix, self._on_read = (
            checkpoint,
            dtype,
            quantization,
            prefix,
            on_read,
        )
        self.vector_dtype = vector_dtype or dtype
        self.config = checkpoint.config
        self._names = checkpoint.names()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._names

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(self._full_name(name)).to(self.vector_dtype)
        self._on_read(tensor.numel())
        return tensor

    def load_matrix(self, name: str, embedding: bool = False, transposed: bool = False) -> Weight:
        """A matrix [out, in], or an `embedding` (or head) [V, E]. `transposed`: the tensor is stored [in, out].

        What is not as chosen is quantised from its numbers, unless its groups are not whole: then it is dense.
        """
        full = self._full_name(name)
        matrix = self._read_matrix(full, embedding, transposed)
        self._on_read(matrix.shape.numel())
        return matrix

    def scope(self, prefix: str) -> Weights:
        """The same weights, names taken below a prefix."""
        return Weights(
            self.checkpoint, self.dtype, self.quantization, self.prefix + prefix, self._on_read, self.vector_dtype
        )

    def _full_name(self, name: str) -> str:
        """The whole name of a tensor. Raises ValueError where there is none."""
        full = self.prefix + name
        if full not in self._names:
            raise ValueError(
                f"the model file has no tensor {full!r}: it is damaged, or not a {self.config.get('model_type')} model"
            )
        return full

    def _read_matrix(self, name: str, embedding: bool, transposed: bool) -> Weight:
        exact = self.quantization == "bf16" or (self.quantization == "auto" and self.dtype == torch.float32)
        stored = None if exact else self.checkpoint.read_quantized(name, transposed)
        four = self.quantization == "int4" and not embedding
        if stored is not None and (self.quantization == "auto" or isinstance(stored, Int4 if four else Int8)):
            return stored
        numbers = self.checkpoint.read(name)
        dense = numbers.T.contiguous() if transposed else numbers  # [out, in]
        if self.quantization in ("auto", "bf16") or not is_quantizable(dense):
            return dense.to(self.dtype)
        try:
            return quantize_int4(dense) if four else quantize_int8(dense)
        except ValueError as e:
            raise ValueError(f"the tensor {name!r} cannot be quantised: {e}") from e


def open_checkpoint(path: Path) -> Checkpoint:
    """The model file or folder at a path. Raises ValueError when it is missing, damaged or not supported."""
    if path.is_dir():
        from retain.formats.random_weights import MARKER_FILE, RandomCheckpoint
        from retain.formats.safetensors import SafetensorsCheckpoint

        if (path / MARKER_FILE).is_file():
            return RandomCheckpoint(path)
        return SafetensorsCheckpoint(path)
    if path.is_file():
        from retain.formats.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise ValueError(f"{path} does not exist: give a .gguf file or a Hugging Face folder")


def open_weights(
    path: Path,
    dtype: torch.dtype,
    quantization: str = "auto",
    progress: bool = False,
    vector_dtype: torch.dtype | None = None,
) -> Weights:
    """The weights at a path, to be read as `dtype` (or `vectors`), their matrices as `weights` says (see `Weights`).

    `progress` shows a bar on stderr, where that is a terminal. Raises ValueError as `open_source` does, and for
    weights that are not known or not for this dtype; a tensor that is damaged shows when it is read.
    """
    check_weights(quantization, str(dtype).removeprefix("torch."))
    source = open_checkpoint(path)
    if not (progress and sys.stderr.isatty()):
        return Weights(source, dtype, quantization, vector_dtype=vector_dtype)
    from tqdm import tqdm

    names = source.names()
    bar = tqdm(total=len(names), desc=f"loading {path.name}", unit="tensor", leave=False, file=sys.stderr)

    def read(elements: int) -> None:
        bar.update()
        if bar.n >= len(names):
            bar.close()

    return Weights(source, dtype, quantization, on_read=read, vector_dtype=vector_dtype)
