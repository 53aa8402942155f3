"""Translate each architecture's tensor names and layouts from llama.cpp's to Hugging Face's.

llama.cpp's converter renames all tensors, and changes the layout of some for its kernels. An Architecture describes the
way back. A new architecture is one more file in architectures/, named like it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from retain.files import quote
from retain.formats.errors import UnsupportedError
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig
from retain.plugins import plugin_names


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture.

    Tensor names lack `.weight` and `.bias`; `layer_prefix` has a {} for the layer's number.
    """

    make_config: Callable[[GGUFMetadata], HFConfig]
    global_tensors: Mapping[str, str]
    layer_prefix: str
    layer_tensors: Mapping[str, str]
    biases: frozenset[str] | None = None  # tensors that may have a bias; None: all
    norm_offset: float = 0.0  # added to the weights of norms by the converter
    transposed: frozenset[str] = frozenset()  # matrices [in, out] in Hugging Face, [out, in] in llama.cpp
    # Of the matrices of all experts, which llama.cpp stacks [n, out, in]; {} is the number of the expert.
    expert_tensors: Mapping[str, str] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()  # tensors that are no `.weight` in Hugging Face
    row_order: Callable[[str, int, HFConfig], Tensor | None] = lambda stem, rows, config: None  # None: as they are

    def to_hf_name(self, name: str, num_layers: int) -> str | None:
        """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; None for an unknown name."""
        stem, _, leaf = name.rpartition(".")
        if leaf == "bias" and self.biases is not None and stem.split(".")[-1] not in self.biases:
            return None
        if stem in self.global_tensors:
            return f"{self.global_tensors[stem]}.{leaf}"
        blk, _, rest = stem.partition(".")
        number, _, stem = rest.partition(".")
        if blk == "blk" and stem in self.layer_tensors and number in map(str, range(num_layers)):
            hf_stem = f"{self.layer_prefix.format(number)}.{self.layer_tensors[stem]}"
            if stem in self.bare:
                return hf_stem if leaf == "weight" else None
            return f"{hf_stem}.{leaf}"
        return None

    def expert_names(self, name: str, num_experts: int, num_layers: int) -> list[str] | None:
        """Return the Hugging Face names of the matrices in a tensor of all experts; None for any other tensor."""
        stem, _, leaf = name.rpartition(".")
        blk, _, rest = stem.partition(".")
        number, _, stem = rest.partition(".")
        if blk != "blk" or stem not in self.expert_tensors or number not in map(str, range(num_layers)):
            return None
        prefix = self.layer_prefix.format(number)
        return [f"{prefix}.{self.expert_tensors[stem].format(e)}.{leaf}" for e in range(num_experts)]

    def to_hf_tensor(self, stem: str, x: Tensor, config: HFConfig) -> Tensor:
        """Convert a tensor to Hugging Face's layout. Raises RuntimeError where it does not fit the config."""
        if self.norm_offset and stem.endswith("norm"):
            return x.float() - self.norm_offset
        if stem in self.transposed and x.ndim == 2:
            return x.T.contiguous()
        order = self.row_order(stem, len(x), config)
        return x if order is None else x[order]


def list_architectures() -> list[str]:
    """Return the names of all files in architectures/, sorted. A `-` of llama.cpp's name is a `_`."""
    return plugin_names("retain.formats.gguf.architectures")


def load_architecture(name: str) -> Architecture:
    """Import an architecture by llama.cpp's name. Raises UnsupportedError for an unknown one."""
    module = name.replace("-", "_")
    if module not in list_architectures():
        known = ", ".join(list_architectures())
        raise UnsupportedError(f"architecture {quote(name)} is not supported: only {known} are")
    architecture: Architecture = importlib.import_module(f"retain.formats.gguf.architectures.{module}").ARCHITECTURE
    return architecture
