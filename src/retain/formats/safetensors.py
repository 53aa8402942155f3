"""Hugging Face folders: config.json and model.safetensors, one file or shards with an index.

Only the language model of a multimodal model is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retain.files import quote, read_json_object, shorten
from retain.formats import mxfp4
from retain.formats.config_limits import check_config_file
from retain.kernels.block_weight import BlockRows, BlockWeight

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
        quantization = config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method and method != "mxfp4":
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
        stems = {name.removesuffix("_blocks") for name in self._locations if name.endswith("_blocks")}
        self._mxfp4 = frozenset(stem for stem in stems if f"{stem}_scales" in self._locations)
        parts = {f"{stem}_{part}" for stem in self._mxfp4 for part in ("blocks", "scales")}
        if both := self._mxfp4 & self._locations.keys():
            raise ValueError(f"{path}: damaged: the tensor {quote(sorted(both)[0])} is there twice, once in MXFP4")
        self._names = frozenset(self._locations.keys() - parts) | self._mxfp4

    def names(self) -> frozenset[str]:
        """See Checkpoint."""
        return self._names

    def read(self, name: str) -> Tensor:
        """See Checkpoint. Raises ValueError for a tensor of integers, too."""
        if blocks := self.read_blocks(name):
            return blocks.dequantize()
        tensor = self._read_stored(name)
        if not tensor.is_floating_point():
            raise ValueError(
                f"{self.path}: the tensor {quote(name)} is of {tensor.dtype}: quantized models are not supported"
            )
        return tensor

    def read_blocks(self, name: str, transposed: bool = False) -> BlockWeight | None:
        """See Checkpoint. The matrices of all experts in MXFP4 are stacked: [n out, in]."""
        if name not in self._mxfp4:
            return None
        blocks = self._read_stored(f"{name}_blocks")
        scales = self._read_stored(f"{name}_scales")
        is_mxfp4 = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, mxfp4.GROUP // 2)
        if not is_mxfp4 or blocks.ndim < 3:
            shapes = f"{list(blocks.shape)} and {list(scales.shape)}"
            raise ValueError(f"{self.path}: the tensor {quote(name)} has blocks and scales of the shapes {shapes}")
        n = scales.shape[-1]
        raw = mxfp4.to_ggml_blocks(blocks.reshape(-1, n, mxfp4.GROUP // 2).numpy(), scales.reshape(-1, n).numpy())
        label = f"{self.path}: the tensor {quote(name)}"
        return BlockWeight.from_rows(BlockRows(label, mxfp4.GGML_TYPE, (len(raw), n * mxfp4.GROUP), raw))

    def _read_stored(self, name: str) -> Tensor:
        opened, stored = self._locations[name]
        try:
            tensor: Tensor = opened.get_tensor(stored)
        except Exception as e:
            raise ValueError(f"{self.path}: the tensor {quote(stored)} is damaged: {shorten(e)}") from e
        return tensor

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
