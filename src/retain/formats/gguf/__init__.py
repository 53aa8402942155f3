"""GGUF, llama.cpp's file format: config, tokenizer and (usually quantized) weights, in one file or in parts.

reader.py indexes a file, split.py joins parts. A file of architectures/ translates metadata and names to Hugging
Face's. Blocks are converted by kernels/weights/ggml_blocks.py. The tokenizer in the metadata is read by
processing/gguf_tokenizer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from retain.files import quote
from retain.formats.config_limits import check_config
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import TENSOR_SCALES, is_layer, load_architecture, split_name
from retain.formats.gguf.metadata import GGUFMetadata
from retain.formats.gguf.split import SplitReader
from retain.formats.gguf.types import GGML_BLOCK_SIZES, TensorInfo
from retain.kernels.weights.ggml_blocks import dequantize_blocks, is_supported
from retain.kernels.weights.quantized import Kind, QuantizedWeight
from retain.kernels.weights.stored_weight import StoredWeight

# Written by old converters, unused by llama.cpp.
IGNORED_TENSORS = ("attn_rot_embd.weight", "attn.masked_bias", "rotary_emb.inv_freq")
CLUSTER_TENSORS = ("masked_embd_centroids.weight", "masked_embd_ordering")  # of assistants; llama.cpp reads none
INDICES = {GGMLQuantizationType.I32: np.int32, GGMLQuantizationType.I64: np.int64}  # types of `d2t` of EAGLE-3 heads
MAX_ROPE_FACTORS = 2**15  # half of the largest head

LONGROPE_TENSORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}


class GGUFCheckpoint:
    """A Checkpoint in a GGUF file, or in parts, of which `path` is any.

    Raises ValueError when a file is missing, damaged or not supported.
    """

    def __init__(self, path: Path):
        self._reader = SplitReader(path)
        self.metadata_reader = self._reader.first
        self.metadata: dict[str, Any] = self._reader.metadata
        with self._reader.wrap_errors():
            name = self.metadata.get("general.architecture", "")
            self._arch = load_architecture(name)
            if self.metadata.get(f"{name}.expert_count") and not self._arch.expert_tensors:
                raise UnsupportedError(f"mixtures of experts are not supported in the architecture {name}")
            shapes = {tensor: info.shape for tensor, info in self._reader.tensors.items()}
            self.config = self._arch.make_config(GGUFMetadata(name, self.metadata, shapes))
            check_config(self.config)
            self._tensor_infos = self._map_names()

    def names(self) -> frozenset[str]:
        """Return the names of all tensors, as Hugging Face has them."""
        return self._names

    def read(self, name: str) -> Tensor:
        """Read a tensor. float16 and bfloat16 stay as stored, integers become int64, every other type float32."""
        with self._reader.wrap_errors():
            stem, info = self._tensor_infos[name]
            if dtype := INDICES.get(GGMLQuantizationType(info.ggml_type)):
                return torch.from_numpy(self._reader.tensor_bytes(info).view(dtype).astype(np.int64)).view(info.shape)
            tensor = self._arch.to_hf_tensor(stem, self._dequantize(info), self.config)
            return tensor if (factor := self._factors.get(name)) is None else tensor * factor

    def read_stored(self, name: str, transposed: bool = False) -> StoredWeight | None:
        """Return a matrix in its blocks, if it has any, with the row order of llama.cpp's converter undone."""
        with self._reader.wrap_errors():
            stem, info = self._tensor_infos[name]
            is_matrix = len(info.shape) == (3 if stem in self._arch.stacked else 2)
            has_blocks = GGML_BLOCK_SIZES[info.ggml_type][0] > 1
            if not is_matrix or not has_blocks or (stem in self._arch.transposed) != transposed:
                return None
            matrix = self._reader.read_stored(name, info)
            if (factor := self._factors.get(name)) is not None:
                matrix = scale_stored(matrix, factor)
            if (order := self._arch.row_order(stem, info.shape[0], self.config)) is not None:
                matrix = matrix[order]
            if (order := self._arch.column_order(stem, info.shape[1], self.config)) is not None:
                return matrix.select_columns(order)
            return matrix

    @property
    def _num_layers(self) -> int:
        """The layers whose tensors have names here: with the first MTP layer."""
        predicts = "nextn.eh_proj" in self._arch.layer_tensors and self.config["num_nextn_predict_layers"] > 0
        return int(self.config["num_hidden_layers"]) + predicts

    def _map_names(self) -> dict[str, tuple[str, TensorInfo]]:
        """Map each Hugging Face name to llama.cpp's name of the module inside its layer, and the tensor's place."""
        infos: dict[str, tuple[str, TensorInfo]] = {}
        self._factors: dict[str, float] = {}  # of whole matrices, by Hugging Face name
        for ggml_type in {x.ggml_type for name, x in self._reader.tensors.items() if name not in CLUSTER_TENSORS}:
            if not is_supported(ggml_type) and not (ggml_type in INDICES and "d2t" in self._arch.global_tensors):
                raise UnsupportedError(f"tensors of type {GGMLQuantizationType(ggml_type).name} are not supported")
        for name, info in self._reader.tensors.items():
            if name == "rope_freqs.weight":
                self._apply_rope_factors(info)
            elif name in LONGROPE_TENSORS:
                self._apply_longrope_factors(name, info)
            elif read := self._arch.config_reader(name, self.config["num_hidden_layers"]):
                self.config |= read(self._dequantize(info).float(), self.config)
            elif self._is_ignored(name):
                continue
            elif scaled := self._find_scaled(name):
                if name.endswith(".scale"):  # the other one is of inputs that are quantized, too: none are here
                    self._factors |= self._read_factors(name, info, scaled)
            else:
                found = self._map_name(name, info)
                if twice := infos.keys() & found.keys():
                    raise ValueError(f"the tensor {quote(sorted(twice)[0])} is there twice, once as {quote(name)}")
                infos |= found
        self._names = frozenset(infos)
        return infos

    def _is_ignored(self, name: str) -> bool:
        """Return whether a tensor does not count, such as one of an MTP layer.

        But for those of the first of these layers that are known.
        """
        first = self.config["num_hidden_layers"]
        end = first + self.config["num_nextn_predict_layers"]
        if not is_layer(split_name(name)[0], end, first):
            return name.endswith((*IGNORED_TENSORS, *CLUSTER_TENSORS))
        known = self._arch.to_hf_name(name, self._num_layers) or self._arch.expert_names(name, 1, self._num_layers)
        return not known

    def _find_scaled(self, name: str) -> str | None:
        """Return the matrix in NVFP4 that a tensor of scales is for; None for any other tensor."""
        stem, _, leaf = name.rpartition(".")
        matrix = self._reader.tensors.get(f"{stem}.weight")
        is_quantized = matrix is not None and matrix.ggml_type == GGMLQuantizationType.NVFP4
        if leaf not in TENSOR_SCALES or not is_quantized:
            return None
        is_named = self._arch.to_hf_name(name, self._num_layers)  # as Gemma 4's factors of experts
        return None if is_named else f"{stem}.weight"

    def _read_factors(self, name: str, info: TensorInfo, scaled: str) -> dict[str, float]:
        """Return the factor of each matrix in a tensor: one of all, or one of each expert. Raises ValueError."""
        names = [*self._map_name(scaled, self._reader.tensors[scaled])]
        factors = self._dequantize(info).float().flatten()
        n = len(factors)
        if n not in (1, self.config.get("num_experts", 1)) or len(names) % n or not factors.isfinite().all():
            raise ValueError(f"the tensor {quote(name)} is not a finite number for each matrix of {quote(scaled)}")
        return dict(zip(names, factors.repeat_interleave(len(names) // n).tolist(), strict=True))

    def _map_name(self, name: str, info: TensorInfo) -> dict[str, tuple[str, TensorInfo]]:
        """Map a tensor, or each matrix of a tensor of all experts. Raises UnsupportedError for an unknown name."""
        _, stem, _ = split_name(name)
        num_layers = self._num_layers
        if hf_name := self._arch.to_hf_name(name, num_layers):
            return {hf_name: (stem, info)}
        num_experts = self.config.get("num_experts", 0)
        names = self._arch.expert_names(name, num_experts, num_layers)
        if not names:
            raise UnsupportedError(f"the tensor {quote(name)} is not known in a {self.config['model_type']} model")
        if info.shape[0] != num_experts:
            raise ValueError(f"the tensor {quote(name)} has the shape {info.shape}, not of {num_experts} experts")
        return {
            hf_name: (stem, part) for hf_name, part in zip(names, info.split(len(names) // num_experts), strict=True)
        }

    def _apply_rope_factors(self, info: TensorInfo) -> None:
        """Put a tensor of divisors of the rope frequencies into the config."""
        if info.shape[0] > MAX_ROPE_FACTORS:
            raise ValueError(f"the tensor 'rope_freqs.weight' has the shape {info.shape}")
        self.config |= self._arch.read_rope_factors(self._dequantize(info).float(), self.config)

    def _apply_longrope_factors(self, name: str, info: TensorInfo) -> None:
        """Put one of two lists of divisors of the rope frequencies (long contexts of Phi-3) into the config."""
        scaling = self.config.get("rope_scaling") or {}
        if scaling.get("rope_type") != "longrope":
            raise UnsupportedError(f"the tensor {quote(name)} is not known in a {self.config['model_type']} model")
        if len(info.shape) != 1 or 2 * info.shape[0] > self.config["head_dim"]:
            raise ValueError(f"the tensor {quote(name)} has the shape {info.shape}")
        scaling[LONGROPE_TENSORS[name]] = self._dequantize(info).tolist()

    def _dequantize(self, info: TensorInfo) -> Tensor:
        return dequantize_blocks(self._reader.tensor_bytes(info), info.ggml_type, info.shape)


def scale_stored(stored: StoredWeight, factor: float) -> StoredWeight:
    """Return a matrix that is multiplied by a factor when it is converted: of quantized rows, scales are."""

    def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        matrix = stored.load(begin, end, torch.float32 if isinstance(kind, torch.dtype) else kind)
        if isinstance(matrix, Tensor):
            return (matrix * factor).to(kind if isinstance(kind, torch.dtype) else torch.float32)
        scaled = matrix.scale_rows(torch.full((matrix.shape[0],), factor))
        if matrix.scale.any() and not scaled.scale.any():
            raise UnsupportedError(f"{quote(stored.name)}: its numbers are too small for scales in float16")
        return scaled

    return StoredWeight(stored.name, stored.shape, stored.kind, load, stored.release)
