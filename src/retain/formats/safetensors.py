"""Hugging Face folders: config.json and model.safetensors, one file or shards with an index.

Only the language model of a multimodal model is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from retain.files import quote, read_json_object, shorten
from retain.formats.config_limits import check_config_file

# Prefixes of the language model in a multimodal model, and in the model alone. The second is that of older files.
MULTIMODAL_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
SHARED_KEYS = ("eos_token_id", "tie_word_embeddings")  # of a multimodal config; they count there, not in text_config


class SafetensorsCheckpoint:
    """A Checkpoint in a folder. Raises ValueError where a file is missing, damaged or a pickle."""

    def __init__(self, path: Path):
        self.path = path
        config = read_json_object(path / "config.json")
        self.config = config
        if is_multimodal := isinstance(text_config := config.get("text_config"), dict):
            self.config = {key: value for key, value in text_config.items() if key not in SHARED_KEYS}
            self.config |= {key: config[key] for key in SHARED_KEYS if key in config}
        check_config_file(self.config, path / "config.json")
        if quantization := config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ValueError(
                f"{path}: weights quantized by {quote(method)} are not supported: use a .gguf file, or the original"
            )
        self._locations: dict[str, tuple[Any, str]] = {}  # name -> the open file, the tensor's name in it
        for file, names in self._list_files().items():
            opened, stored_names = _open_safetensors(file)
            for stored in stored_names if names is None else names:
                if stored not in stored_names:
                    raise ValueError(f"{file}: damaged: it lacks the tensor {quote(stored)}, which the index lists")
                if name := _language_model_name(stored) if is_multimodal else stored:
                    self._locations[name] = opened, stored
        self._names = frozenset(self._locations)

    def names(self) -> frozenset[str]:
        """See Checkpoint."""
        return self._names

    def read(self, name: str) -> Tensor:
        """See Checkpoint. Raises ValueError for a tensor of integers, too."""
        opened, stored = self._locations[name]
        try:
            tensor: Tensor = opened.get_tensor(stored)
        except Exception as e:
            raise ValueError(f"{self.path}: the tensor {quote(stored)} is damaged: {shorten(e)}") from e
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.path}: the tensor {quote(stored)} is of {tensor.dtype}: quantized models are not supported"
            )
        return tensor

    def read_blocks(self, name: str, transposed: bool = False) -> None:
        """Return None: nothing here is quantized."""

    def _list_files(self) -> dict[Path, set[str] | None]:
        """Return the files with weights, and which tensors to read from each; None stands for all."""
        if (single := self.path / "model.safetensors").is_file():
            return {single: None}
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            if any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*")):
                raise ValueError(
                    f"{self.path}: its weights are pickled, which could run code: convert them to safetensors"
                )
            raise ValueError(f"{self.path}: no weights: it has neither model.safetensors nor {index.name}")
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index}: damaged: it has no weight_map")
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"{index}: damaged: {quote(file)} is not a file of this folder")
            files.setdefault(self.path / file, set()).add(name)
        return dict(files)


def _open_safetensors(file: Path) -> tuple[Any, Iterable[str]]:
    """Map a safetensors file, and return it with the names of its tensors. Raises ValueError."""
    from safetensors import safe_open

    try:
        opened = safe_open(file, framework="pt")
        return opened, frozenset(opened.keys())  # type: ignore[no-untyped-call]
    except OSError as e:
        raise ValueError(f"{file}: cannot be read: {e.strerror or e}") from e
    except Exception as e:
        raise ValueError(f"{file}: damaged: {shorten(e)}") from e


def _language_model_name(name: str) -> str | None:
    """Return a multimodal model's tensor name as in the language model alone; None for tensors of other parts."""
    for before, after in MULTIMODAL_PREFIXES:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name if name.startswith("lm_head.") else None
