"""GGUF, llama.cpp's file format: config, tokenizer and (usually quantized) weights, in one file or in parts.

reader.py indexes a file, split.py joins parts. A file of architectures/ translates metadata and names to Hugging
Face's. Blocks are converted by kernels/ggml_blocks.py. The tokenizer in the metadata is read by
processing/gguf_tokenizer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType
from torch import Tensor

from retain.files import quote
from retain.formats.config_limits import check_config
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import load_architecture
from retain.formats.gguf.metadata import GGUFMetadata, recover_llama3_scaling
from retain.formats.gguf.split import SplitReader
from retain.formats.gguf.types import GGML_BLOCK_SIZES, TensorInfo
from retain.kernels.ggml_blocks import dequantize_blocks, is_supported
from retain.kernels.stored_weight import StoredWeight

# Written by old converters, unused by llama.cpp.
IGNORED_TENSORS = ("attn_rot_embd.weight", "attn.masked_bias", "rotary_emb.inv_freq")


class GGUFCheckpoint:
    """A Checkpoint in a GGUF file, or in parts, of which `path` is any.

    Raises ValueError when a file is missing, damaged or not supported.
    """

    def __init__(self, path: Path):
        self._reader = SplitReader(path)
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
        """See Checkpoint."""
        return self._names

    def read(self, name: str) -> Tensor:
        """See Checkpoint. float16 and bfloat16 stay as stored, every other type becomes float32."""
        with self._reader.wrap_errors():
            stem, info = self._tensor_infos[name]
            return self._arch.to_hf_tensor(stem, self._dequantize(info), self.config)

    def read_stored(self, name: str, transposed: bool = False) -> StoredWeight | None:
        """See Checkpoint. The order of rows that llama.cpp's converter chose is undone."""
        with self._reader.wrap_errors():
            stem, info = self._tensor_infos[name]
            is_matrix = len(info.shape) == 2 and GGML_BLOCK_SIZES[info.ggml_type][0] > 1
            if not is_matrix or (stem in self._arch.transposed) != transposed:
                return None
            blocks = StoredWeight.from_rows(self._reader.block_rows(name, info))
            order = self._arch.row_order(stem, info.shape[0], self.config)
            return blocks if order is None else blocks.select_rows(order)

    def _map_names(self) -> dict[str, tuple[str, TensorInfo]]:
        """Map each Hugging Face name to llama.cpp's name of the module inside its layer, and the tensor's place."""
        infos: dict[str, tuple[str, TensorInfo]] = {}
        for ggml_type in {info.ggml_type for info in self._reader.tensors.values()}:
            if not is_supported(ggml_type):
                raise UnsupportedError(f"tensors of type {GGMLQuantizationType(ggml_type).name} are not supported")
        for name, info in self._reader.tensors.items():
            if name == "rope_freqs.weight":
                self._apply_rope_factors(info)
            elif not name.endswith(IGNORED_TENSORS):
                infos |= self._map_name(name, info)
        self._names = frozenset(infos)
        return infos

    def _map_name(self, name: str, info: TensorInfo) -> dict[str, tuple[str, TensorInfo]]:
        """Map a tensor, or each matrix of a tensor of all experts. Raises UnsupportedError for an unknown name."""
        stem = name.split(".")[-2]
        num_layers = self.config["num_hidden_layers"]
        if expert_names := self._arch.expert_names(name, self.config.get("num_experts", 0), num_layers):
            if info.shape[0] != len(expert_names):
                raise ValueError(
                    f"the tensor {quote(name)} has the shape {info.shape}, not of {len(expert_names)} experts"
                )
            return {hf_name: (stem, part) for hf_name, part in zip(expert_names, info.split(), strict=True)}
        hf_name = self._arch.to_hf_name(name, num_layers)
        if hf_name is None:
            raise UnsupportedError(f"the tensor {quote(name)} is not known in a {self.config['model_type']} model")
        return {hf_name: (stem, info)}

    def _apply_rope_factors(self, info: TensorInfo) -> None:
        """Put a tensor of divisors of the rope frequencies (Llama 3.1 and later) into the config."""
        if "rope_scaling" not in self.config or self.config["rope_scaling"]:
            raise UnsupportedError(f"rope_freqs.weight in a {self.config['model_type']} model with another scaling")
        if len(info.shape) != 1 or 2 * info.shape[0] != self.config.get("head_dim"):
            raise ValueError(f"the tensor 'rope_freqs.weight' has the shape {info.shape}")
        self.config["rope_scaling"] = recover_llama3_scaling(self._dequantize(info).float(), self.config["rope_theta"])

    def _dequantize(self, info: TensorInfo) -> Tensor:
        return dequantize_blocks(self._reader.tensor_bytes(info), info.ggml_type, info.shape)
