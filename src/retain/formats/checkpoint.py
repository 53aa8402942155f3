"""The interface of a model file, and the choice of the format that reads a path."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from retain.formats.gguf import GGUFCheckpoint
from retain.formats.gguf.reader import GGUFReader
from retain.formats.gguf.split import part_paths
from retain.formats.random_weights import MARKER_FILE, RandomCheckpoint
from retain.formats.safetensors import SafetensorsCheckpoint
from retain.kernels.weights.stored_weight import StoredWeight


class Checkpoint(Protocol):
    """One model in one file format. Files are memory-mapped: a tensor uses memory only once it is read.

    `config` holds what config.json holds. No format unpickles anything.
    """

    config: dict[str, Any]

    def names(self) -> Set[str]:
        """Return the Hugging Face names of all tensors."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, dequantized, as float32, float16 or bfloat16; one of indices as int64.

        Raises ValueError when it is damaged.
        """

    def read_stored(self, name: str, transposed: bool = False) -> StoredWeight | None:
        """Return a matrix [out, in] as it is stored, or None where the file holds no matrix that can be read in parts.

        `transposed`: the tensor that `read` returns is [in, out]. Stacked matrices are one below the other. Raises
        ValueError when the tensor is damaged.
        """


def list_model_files(path: Path) -> list[Path]:
    """Return the files whose bytes decide what the model at `path` computes."""
    return [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else part_paths(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model file or folder at `path`. Raises ValueError when it is missing, damaged or not supported."""
    if path.is_file():
        return GGUFCheckpoint(path)
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a .gguf file or a Hugging Face folder")
    return RandomCheckpoint(path) if (path / MARKER_FILE).is_file() else SafetensorsCheckpoint(path)


def metadata_reader(checkpoint: Checkpoint) -> GGUFReader | None:
    """Return what has read the metadata of a GGUF file; None for a folder. Vocabularies take long to read twice."""
    return checkpoint.metadata_reader if isinstance(checkpoint, GGUFCheckpoint) else None
