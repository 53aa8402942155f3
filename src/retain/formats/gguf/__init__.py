"""Weights out of a GGUF file, llama.cpp's format: one file with everything, usually quantised.

header.py finds what is in the file, blocks.py makes numbers or quanta of it, configs.py and archs.py translate into
Hugging Face's language.
What is not known here: what the tensors mean, and the tokenizer that lies in the metadata (text/ reads that).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from retain.formats.gguf.config import GGUFMetadata, recover_llama3_scaling
from retain.formats.gguf.reader import GGUFReader, TensorInfo, UnsupportedError
from retain.formats.gguf.tensor_names import ARCHITECTURES
from retain.kernels.quantized import QuantizedWeight, is_quantizable, quantize_int8

# Written by old converters, read by nobody.
IGNORED_TENSORS = ("attn_rot_embd.weight", "attn.masked_bias", "rotary_emb.inv_freq")


class GGUFCheckpoint:
    """A Source (models/weights.py). Raises ValueError for a file that is missing, damaged or of an unknown kind."""

    def __init__(self, path: Path):
        self._reader = header = GGUFReader(path)
        self.metadata: dict[str, Any] = header.metadata
        with header.wrap_errors():
            if (parts := self.metadata.get("split.count", 0)) > 1:
                raise UnsupportedError(f"one of {parts} parts: join them with `llama-gguf-split --merge`")
            name = self.metadata.get("general.architecture", "")
            if name not in ARCHITECTURES:
                raise UnsupportedError(f"architecture {name!r} is not supported: only {', '.join(ARCHITECTURES)} are")
            self._arch = ARCHITECTURES[name]
            shapes = {name: t.shape for name, t in header.tensors.items()}
            self.config = self._arch.make_config(GGUFMetadata(name, self.metadata, shapes))
            self._tensor_infos = self._map_names()

    def names(self) -> frozenset[str]:
        """The Hugging Face names of all tensors."""
        return self._names

    def read(self, name: str) -> Tensor:
        """One tensor: float16 and bfloat16 as stored, everything else float32. Raises ValueError when it is damaged."""
        with self._reader.wrap_errors():
            stem, stored = self._tensor_infos[name]
            return self._arch.to_hf_tensor(stem, self._dequantize(stored), self.config)

    def read_quantized(self, name: str, transposed: bool = False) -> QuantizedWeight | None:
        """See models/weights.py. What llama.cpp's converter did to matrices permutes rows, or is what is asked for."""
        from retain.formats.gguf.dequantize import unpack_quantized

        with self._reader.wrap_errors():
            stem, stored = self._tensor_infos[name]
            matrix = unpack_quantized(self._reader.tensor_bytes(stored), stored.ggml_type, stored.shape)
            self._reader.release(stored)
            if matrix is None:
                return None
            if (stem in self._arch.transposed) != transposed:
                turned = matrix.dequantize().T
                return quantize_int8(turned) if is_quantizable(turned) else None
            order = self._arch.row_order(stem, matrix.shape[0], self.config)
            return matrix if order is None else matrix.select_rows(order)

    def _map_names(self) -> dict[str, tuple[str, TensorInfo]]:
        """Hugging Face's name -> what llama.cpp calls the module in its layer, and where the tensor lies."""
        named = {}
        for name, stored in self._reader.tensors.items():
            if name == "rope_freqs.weight":
                self._apply_rope_factors(stored)
            elif not name.endswith(IGNORED_TENSORS):
                theirs = self._arch.to_hf_name(name, self.config["num_hidden_layers"])
                if theirs is None:
                    raise UnsupportedError(f"the tensor {name!r} is not known in a {self.config['model_type']} model")
                named[theirs] = (name.split(".")[-2], stored)
        self._names = frozenset(named)
        return named

    def _apply_rope_factors(self, info: TensorInfo) -> None:
        """Llama 3.1 and later divide the rotary frequencies by a tensor."""
        if "rope_scaling" not in self.config or self.config["rope_scaling"]:
            raise UnsupportedError(f"rope_freqs.weight in a {self.config['model_type']} model with another scaling")
        if len(info.shape) != 1 or 2 * info.shape[0] != self.config.get("head_dim"):
            raise ValueError(f"the tensor 'rope_freqs.weight' has the shape {info.shape}")
        self.config["rope_scaling"] = recover_llama3_scaling(self._dequantize(info).float(), self.config["rope_theta"])

    def _dequantize(self, info: TensorInfo) -> Tensor:
        from retain.formats.gguf.dequantize import dequantize_tensor

        return dequantize_tensor(self._reader.tensor_bytes(info), info.ggml_type, info.shape)
