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
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_llama3_rope_factors
from retain.plugins import plugin_names

# Of a tensor's stem and its number of rows: the place in the file of each row, int64 [rows]; None where they are equal.
Order = Callable[[str, int, HFConfig], Tensor | None]
TENSOR_SCALES = ("scale", "input_scale")  # of whole tensors, in files of NVFP4 from ModelOpt


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
    stacked: frozenset[str] = frozenset()  # matrices [n, out, in] on both sides
    # Of the matrices of all experts, which llama.cpp stacks [n, out, in]; {} is the number of the expert. Several names
    # share the rows of each expert.
    expert_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Names inside a layer that change with their ending, as `ssm_dt.bias` to `linear_attn.dt_bias`.
    whole_names: Mapping[str, str] = field(default_factory=dict)
    row_order: Order = lambda stem, rows, config: None
    column_order: Order = lambda stem, columns, config: None
    values: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)  # of numbers and shapes, by stem
    # What tensors inside layers change in a config, by stem: they are no tensors of the family.
    config_tensors: Mapping[str, Callable[[Tensor, HFConfig], HFConfig]] = field(default_factory=dict)
    # What a tensor of divisors of the rope frequencies changes in a config.
    read_rope_factors: Callable[[Tensor, HFConfig], HFConfig] = read_llama3_rope_factors

    def to_hf_name(self, name: str, num_layers: int) -> str | None:
        """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; None for an unknown name."""
        layer, stem, leaf = split_name(name)
        if layer and not is_layer(layer, num_layers):
            return None
        prefix = self.layer_prefix.format(layer)
        if layer and (whole := self.whole_names.get(name.removeprefix(f"blk.{layer}."))):
            return f"{prefix}.{whole}"
        if leaf in TENSOR_SCALES:
            return None
        if leaf == "bias" and self.biases is not None and stem not in self.biases:
            return None
        if layer:
            return f"{prefix}.{self.layer_tensors[stem]}.{leaf}" if stem in self.layer_tensors else None
        return f"{self.global_tensors[stem]}.{leaf}".rstrip(".") if stem in self.global_tensors else None

    def config_reader(self, name: str, num_layers: int) -> Callable[[Tensor, HFConfig], HFConfig] | None:
        """Return what reads changes of the config from this tensor; None for any other tensor."""
        layer, stem, leaf = split_name(name)
        return self.config_tensors.get(stem) if leaf == "weight" and is_layer(layer, num_layers) else None

    def expert_names(self, name: str, num_experts: int, num_layers: int) -> list[str] | None:
        """Return the Hugging Face names of the matrices in a tensor of all experts; None for any other tensor."""
        layer, stem, leaf = split_name(name)
        is_known = stem in self.expert_tensors and is_layer(layer, num_layers)
        if leaf in TENSOR_SCALES or not is_known:
            return None
        prefix = self.layer_prefix.format(layer)
        return [f"{prefix}.{part.format(e)}.{leaf}" for e in range(num_experts) for part in self.expert_tensors[stem]]

    def to_hf_tensor(self, stem: str, x: Tensor, config: HFConfig) -> Tensor:
        """Convert a tensor to Hugging Face's layout. Raises RuntimeError where it does not fit the config."""
        if self.norm_offset and stem.endswith("norm"):
            return x.float() - self.norm_offset
        if stem in self.transposed and x.ndim == 2:
            return x.T.contiguous()
        if (order := self.row_order(stem, len(x), config)) is not None:
            x = x[order]
        if x.ndim == 2 and (order := self.column_order(stem, x.shape[1], config)) is not None:
            x = x[:, order]
        return self.values[stem](x) if stem in self.values else x


def split_name(name: str) -> tuple[str, str, str]:
    """Split `blk.3.attn_q.weight` into `3`, `attn_q` and `weight`. The first is empty outside of layers."""
    layer = ""
    if name.startswith("blk."):
        _, layer, name = (*name.split(".", 2), "")[:3]
    stem, _, leaf = name.rpartition(".")
    return layer, stem or leaf, leaf if stem else ""


def is_layer(text: str, end: int, begin: int = 0) -> bool:
    """Return whether a part of a tensor's name is a number from `begin` to `end` - 1, as Python writes it."""
    is_number = len(text) < 10 and text.isascii() and text.isdecimal() and str(int(text)) == text
    return is_number and begin <= int(text) < end


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
