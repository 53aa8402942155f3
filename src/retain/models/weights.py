"""The tensors of one model under their Hugging Face names, read from whatever file holds them, in one dtype.

A source is a file format: models/gguf/ or models/folder.py. It has `config` (what config.json says), `names()` and
`read(name)`. Nothing is unpickled. What is not known here: what the tensors mean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """One file format, one model. Files are memory-mapped; a tensor costs memory when it is read."""

    config: dict[str, Any]

    def names(self) -> Set[str]:
        """The Hugging Face names of all tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised; float32, float16 or bfloat16. Raises ValueError when the file is damaged."""
        ...


class Weights:
    """`w["lm_head.weight"]` is a tensor of `dtype`; `"lm_head.bias" in w`; `w.at("model.layers.3.")` is a part."""

    def __init__(
        self, source: Source, dtype: torch.dtype, prefix: str = "", read: Callable[[int], None] = lambda n: None
    ):
        """`read` is told the number of elements after every tensor that was read (for a progress bar)."""
        self.source, self.dtype, self.prefix, self._read = source, dtype, prefix, read
        self.config = source.config
        self._names = source.names()

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._names

    def __getitem__(self, name: str) -> Tensor:
        full = self.prefix + name
        if full not in self._names:
            raise ValueError(
                f"the model file has no tensor {full!r}: it is damaged, or not a {self.config.get('model_type')} model"
            )
        tensor = self.source.read(full).to(self.dtype)
        self._read(tensor.numel())
        return tensor

    def at(self, prefix: str) -> Weights:
        """The same weights, names taken below a prefix."""
        return Weights(self.source, self.dtype, self.prefix + prefix, self._read)


def open_source(path: Path) -> Source:
    """The model file or folder at a path. Raises ValueError when it is missing, damaged or not supported."""
    if path.is_dir():
        from retain.models.folder import Folder

        return Folder(path)
    if path.is_file():
        from retain.models.gguf import GGUF

        return GGUF(path)
    raise ValueError(f"{path} does not exist: give a .gguf file or a Hugging Face folder")


def open_weights(path: Path, dtype: torch.dtype, progress: bool = False) -> Weights:
    """The weights at a path, to be read as `dtype`. `progress` shows a bar on stderr, where that is a terminal.

    Raises ValueError as `open_source` does; a tensor that is damaged shows when it is read.
    """
    source = open_source(path)
    if not (progress and sys.stderr.isatty()):
        return Weights(source, dtype)
    from tqdm import tqdm

    names = source.names()
    bar = tqdm(total=len(names), desc=f"loading {path.name}", unit="tensor", leave=False, file=sys.stderr)

    def read(elements: int) -> None:
        bar.update()
        if bar.n >= len(names):
            bar.close()

    return Weights(source, dtype, read=read)
