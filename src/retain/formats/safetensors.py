"""Weights out of a Hugging Face folder: config.json and model.safetensors, in one file or in shards named by an index.

Of a multimodal model only the language model is read. What is not known here: what the tensors mean. Nothing is
unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

# Where multimodal models keep the language model: before and after it got the names that it has alone.
MULTIMODAL_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


class SafetensorsCheckpoint:
    """A Source (models/weights.py). Raises ValueError where something is missing, damaged or stored as a pickle."""

    def __init__(self, path: Path):
        self.path = path
        whole = read_json_object(path / "config.json")
        text = whole.get("text_config")
        self.config = {**text, "eos_token_id": whole.get("eos_token_id")} if isinstance(text, dict) else whole
        if method := whole.get("quantization_config"):
            kind = method.get("quant_method") if isinstance(method, dict) else method
            raise ValueError(
                f"{path}: weights quantised by {kind!r} are not supported: use a .gguf file, or the original"
            )
        self._locations: dict[str, tuple[Any, str]] = {}  # name -> the open file, the tensor's name in it
        for file, names in self._list_files().items():
            opened, there = _open_safetensors(file)
            for name in there if names is None else names:
                if name not in there:
                    raise ValueError(f"{file}: damaged: it has no tensor {name!r}, which the index promises")
                if theirs := _language_model_name(name) if text else name:
                    self._locations[theirs] = opened, name
        self._names = frozenset(self._locations)

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return self._names

    def read(self, name: str) -> Tensor:
        """One tensor, as stored. Raises ValueError when it is damaged, or of integers."""
        opened, stored = self._locations[name]
        try:
            tensor: Tensor = opened.get_tensor(stored)
        except Exception as e:
            raise ValueError(f"{self.path}: the tensor {stored!r} is damaged: {e}") from e
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.path}: the tensor {stored!r} is of {tensor.dtype}: quantised models are not supported"
            )
        return tensor

    def read_quantized(self, name: str, transposed: bool = False) -> None:
        """Nothing here is quantised."""

    def _list_files(self) -> dict[Path, set[str] | None]:
        """The files with weights, and which tensors to take from each; None for all."""
        if (whole := self.path / "model.safetensors").is_file():
            return {whole: None}
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            if any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*")):
                raise ValueError(
                    f"{self.path}: its weights are pickled, which could run code: convert them to safetensors"
                )
            raise ValueError(f"{self.path}: no weights: it has neither model.safetensors nor {index.name}")
        where = read_json_object(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{index}: damaged: it has no weight_map")
        files: dict[Path, set[str] | None] = {}
        for name, file in where.items():
            if Path(file).name != file:
                raise ValueError(f"{index}: damaged: {file!r} is no file of this folder")
            names = files.setdefault(self.path / file, set())
            assert names is not None
            names.add(name)
        return files


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: damaged: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged: it holds no object")
    return value


def _open_safetensors(file: Path) -> tuple[Any, Iterable[str]]:
    """A safetensors file, mapped, and the names of its tensors."""
    from safetensors import safe_open

    try:
        opened = safe_open(file, framework="pt")
        return opened, frozenset(opened.keys())  # type: ignore[no-untyped-call]
    except OSError as e:
        raise ValueError(f"{file}: cannot be read: {e.strerror or e}") from e
    except Exception as e:
        raise ValueError(f"{file}: damaged: {e}") from e


def _language_model_name(name: str) -> str | None:
    """The name that a multimodal model's tensor has in the language model alone; None for one of the other parts."""
    for before, after in MULTIMODAL_PREFIXES:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name if name.startswith("lm_head.") else None
