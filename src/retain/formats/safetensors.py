"""Hugging Face folders: config.json and model.safetensors, one file or shards with an index.

Only the language model of a multimodal model is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from retain.files import quote, read_json_object
from retain.formats.config_limits import check_config_file
from retain.formats.errors import UnsupportedError
from retain.formats.quantization import IGNORED_ENDINGS, find_quantization
from retain.formats.tensor_file import TensorFile
from retain.kernels.weights.quantized import Kind, QuantizedWeight, to_kind
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import dequantize

# Prefixes of the language model in a multimodal model, and in the model alone. The second is that of older files.
MULTIMODAL_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DRAFT_HEADS = ("gemma4_assistant",)  # models that are no multimodal ones, although their config has a text model inside
SHARED_KEYS = ("eos_token_id", "tie_word_embeddings")  # of a multimodal config; they count there, not in text_config


class SafetensorsCheckpoint:
    """A Checkpoint in a folder. Raises ValueError where a file is missing, damaged or a pickle."""

    def __init__(self, path: Path):
        self.path = path
        config = read_json_object(path / "config.json")
        self.config = config
        text_config = config.get("text_config")
        if is_multimodal := isinstance(text_config, dict) and config.get("model_type") not in DRAFT_HEADS:
            self.config = {key: value for key, value in text_config.items() if key not in SHARED_KEYS}
            self.config |= {key: config[key] for key in SHARED_KEYS if key in config}
        for checked in [self.config, text_config] if isinstance(text_config, dict) else [self.config]:
            check_config_file(checked, path / "config.json")
        with self._wrap_errors("config.json"):
            stored = config.get("quantization_config") or self.config.get("quantization_config")
            quantization = find_quantization(stored)
        self._locations: dict[str, tuple[TensorFile, str]] = {}  # name -> the file, the tensor's name in it
        for file, names in self._list_files().items():
            opened = TensorFile(file)
            for stored_name in opened.names if names is None else names:
                if stored_name not in opened.names:
                    raise ValueError(
                        f"{file}: damaged: it lacks the tensor {quote(stored_name)}, which the index lists"
                    )
                if name := _language_model_name(stored_name) if is_multimodal else stored_name:
                    if name in self._locations:
                        other = quote(self._locations[name][1])
                        raise ValueError(f"{file}: damaged: the tensors {other} and {quote(stored_name)} are one")
                    self._locations[name] = opened, stored_name
        self._quantization = quantization
        self._parts: dict[str, dict[str, str]] = {}  # name of a quantized matrix -> its tensors by part
        names_left = set(self._locations)
        if quantization is not None:
            names_left = {name for name in names_left if not name.endswith(IGNORED_ENDINGS)}
            with self._wrap_errors("damaged"):
                self._parts = quantization.find(names_left)
        parts = {stored for own in self._parts.values() for stored in own.values()}
        self._names = frozenset((names_left - parts) | self._parts.keys())

    def names(self) -> frozenset[str]:
        """Return the names of all tensors, quantized ones by their matrix."""
        return self._names

    def read(self, name: str) -> Tensor:
        """Read a tensor, dequantized; int64 as it is. Raises ValueError where it is damaged, or of other integers."""
        if name in self._parts:
            return dequantize(replace(self._open_quantized(name), kind=torch.float32))
        tensor = self._read_tensor(name)
        return tensor if tensor.dtype == torch.int64 else self._read_dense(name)

    def read_stored(self, name: str, transposed: bool = False) -> StoredWeight | None:
        """Return a matrix as it is stored. Stacked ones [n, out, in] are one below the other: [n out, in]."""
        if name in self._parts:
            return self._open_quantized(name)
        tensor = self._read_dense(name)
        if tensor.ndim not in (2, 3) or tensor.numel() == 0:
            return None
        stacked = tensor if tensor.ndim == 3 else tensor[None]
        stacked = stacked.transpose(1, 2) if transposed else stacked
        n, out, width = stacked.shape

        def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
            return to_kind(_select_range(stacked, begin, end), kind)

        release = partial(self._release, [name], (n, out) if transposed else (n * out, 1))
        return StoredWeight(self._label(name), torch.Size((n * out, width)), tensor.dtype, load, release)

    def _open_quantized(self, name: str) -> StoredWeight:
        assert self._quantization is not None
        parts = self._parts[name]
        tensors = {part: self._read_tensor(stored) for part, stored in parts.items()}
        label = self._label(name)
        try:
            matrix = self._quantization.read_matrix(label, tensors)
        except ValueError as e:
            raise ValueError(f"{label} is damaged: {e}") from e
        n = matrix.shape[0]
        release = partial(self._release, [*parts.values()], (1, n) if self._quantization.by_column else (n, 1))
        return replace(matrix, release=release)

    def _read_dense(self, name: str) -> Tensor:
        tensor = self._read_tensor(name)
        if tensor.dtype not in DENSE_DTYPES:
            raise ValueError(
                f"{self._label(name)} is of {tensor.dtype}, and nothing says how it is quantized: that is not supported"
            )
        return tensor

    def _read_tensor(self, name: str) -> Tensor:
        opened, stored = self._locations[name]
        return opened.read(stored)

    def _release(self, names: list[str], parts: tuple[int, int], begin: int, end: int) -> None:
        """Free the memory of rows begin .. end - 1 of tensors, which are so many parts of so many rows."""
        num_parts, rows = parts
        for name in names:
            opened, stored = self._locations[name]
            opened.release(stored, begin // rows, -(-end // rows), num_parts)

    def _label(self, name: str) -> str:
        return f"{self.path}: the tensor {quote(name)}"

    @contextmanager
    def _wrap_errors(self, what: str) -> Iterator[None]:
        """Name the folder, and what is read of it, in errors inside the block."""
        try:
            yield
        except UnsupportedError as e:
            raise UnsupportedError(f"{self.path}: {e}") from None
        except ValueError as e:
            raise ValueError(f"{self.path}: {what}: {e}") from None

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


def _select_range(stacked: Tensor, begin: int, end: int) -> Tensor:
    """Return rows begin .. end - 1 of the matrices [n, out, in], one below the other; a view where it can be one."""
    n, out, width = stacked.shape
    if stacked.is_contiguous():
        return stacked.view(n * out, width)[begin:end]
    rows = torch.empty(end - begin, width, dtype=stacked.dtype)
    for e in range(begin // out, -(-end // out)):  # copying one by one is several times as fast as torch.cat
        first = max(begin, e * out)
        last = min(end, (e + 1) * out)
        rows[first - begin : last - begin] = stacked[e, first - e * out : last - e * out]
    return rows


def _language_model_name(name: str) -> str | None:
    """Return a multimodal model's tensor name as in the language model alone; None for tensors of other parts."""
    for before, after in MULTIMODAL_PREFIXES:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name if name.startswith("lm_head.") else None
