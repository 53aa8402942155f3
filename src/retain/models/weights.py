"""The tensors of one model by their Hugging Face names, in the precision that the caller chose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from retain.config import check_weights
from retain.files import quote
from retain.formats.checkpoint import Checkpoint, open_checkpoint
from retain.kernels.quantized import Int4, Int8, Weight, is_quantizable, quantize_int4, quantize_int8


class Weights:
    """Tensors of a checkpoint: `w["model.norm.weight"]`, `"lm_head.bias" in w`, `w.load_matrix("lm_head.weight")`.

    `quantization` sets the kind of matrices: auto (as the file stores them), bf16 (dense), int8, or int4 (embeddings
    and heads int8). Dense matrices have `dtype`; all other tensors have `vector_dtype`, by default `dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        quantization: str = "auto",
        prefix: str = "",
        on_read: Callable[[int], None] = lambda num_elements: None,
        vector_dtype: torch.dtype | None = None,
    ):
        """`prefix` is put before every name. `on_read` gets the number of elements of each tensor after it is read."""
        self.checkpoint, self.dtype, self.quantization, self.prefix = checkpoint, dtype, quantization, prefix
        self.vector_dtype = vector_dtype or dtype
        self.config = checkpoint.config
        self._on_read, self._names = on_read, checkpoint.names()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._names

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(self._full_name(name)).to(self.vector_dtype)
        self._on_read(tensor.numel())
        return tensor

    def load_matrix(self, name: str, embedding: bool = False, transposed: bool = False) -> Weight:
        """Load a matrix [out, in], or an embedding or head [V, E]. `transposed`: the file stores [in, out].

        A matrix that the file does not store in the chosen kind is quantized here. It stays dense when its rows do
        not divide into whole groups.
        """
        matrix = self._read_matrix(self._full_name(name), embedding, transposed)
        self._on_read(matrix.shape.numel())
        return matrix

    def scope(self, prefix: str) -> Weights:
        """Return the same weights with `prefix` put before every name."""
        return Weights(
            self.checkpoint, self.dtype, self.quantization, self.prefix + prefix, self._on_read, self.vector_dtype
        )

    def _full_name(self, name: str) -> str:
        """Return the name in the checkpoint. Raises ValueError where there is no such tensor."""
        full = self.prefix + name
        if full not in self._names:
            model = quote(self.config.get("model_type"))
            raise ValueError(f"the model file has no tensor {full!r}: it is damaged, or not a {model} model")
        return full

    def _read_matrix(self, name: str, embedding: bool, transposed: bool) -> Weight:
        is_dense = self.quantization == "bf16" or (self.quantization == "auto" and self.dtype == torch.float32)
        stored = None if is_dense else self.checkpoint.read_quantized(name, transposed)
        use_int4 = self.quantization == "int4" and not embedding
        if stored is not None and (self.quantization == "auto" or isinstance(stored, Int4 if use_int4 else Int8)):
            return stored
        tensor = self.checkpoint.read(name)
        dense = tensor.T.contiguous() if transposed else tensor  # [out, in]
        if self.quantization in ("auto", "bf16") or not is_quantizable(dense):
            return dense.to(self.dtype)
        try:
            return quantize_int4(dense) if use_int4 else quantize_int8(dense)
        except ValueError as e:
            raise ValueError(f"the tensor {name!r} cannot be quantized: {e}") from e


def open_weights(
    path: Path,
    dtype: torch.dtype,
    quantization: str = "auto",
    progress: bool = False,
    vector_dtype: torch.dtype | None = None,
) -> Weights:
    """Open the model at `path` (see Weights for the options). `progress` shows a bar if stderr is a terminal.

    Raises ValueError as open_checkpoint does, and for a quantization that is unknown or does not fit `dtype`.
    A damaged tensor raises ValueError when it is read.
    """
    check_weights(quantization, str(dtype).removeprefix("torch."))
    checkpoint = open_checkpoint(path)
    if not (progress and sys.stderr.isatty()):
        return Weights(checkpoint, dtype, quantization, vector_dtype=vector_dtype)
    from tqdm import tqdm

    num_tensors = len(checkpoint.names())
    bar = tqdm(total=num_tensors, desc=f"loading {path.name}", unit="tensor", leave=False, file=sys.stderr)

    def on_read(num_elements: int) -> None:
        bar.update()
        if bar.n >= num_tensors:
            bar.close()

    return Weights(checkpoint, dtype, quantization, on_read=on_read, vector_dtype=vector_dtype)
