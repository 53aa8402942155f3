"""Write quantized Hugging Face folders, after the descriptions of the formats; numpy alone, number by number.

A packer quantizes nothing: it draws random numbers, scales and zeros, and returns the tensors of a matrix and what they
mean, w = scale * (q - zero) in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers.tiny_models import TinyCheckpoint

Packed = tuple[dict[str, Tensor], Tensor]  # the tensors by the end of their names, and the matrix [out, in]
Packer = Callable[[int, int, int], Packed]  # of out, in, seed
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of nibble i of a word
METHODS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 24]},
    "fp8-tensor": {"quant_method": "fp8"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": 32},
    "ct-int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "ct-int4-zeros": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "ct-int4-channel": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "ct-int4-order": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "ct-int8-packed": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "ct-int8": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "ct-fp8": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "ct-fp8-block": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [16, 24]}}},
    },
}


@dataclass(frozen=True)
class QuantizedFolder:
    """A written folder: its path, and the checkpoint of the matrices that its tensors mean."""

    path: Path
    dense: TinyCheckpoint
    quantized: dict[str, Tensor] = field(default_factory=dict)


class ReplacedTensors(TinyCheckpoint):
    """A tiny checkpoint some of whose tensors are others."""

    def __init__(self, checkpoint: TinyCheckpoint, tensors: Mapping[str, Tensor]):
        super().__init__(checkpoint.config, checkpoint.shapes, checkpoint.seed)
        self.tensors = tensors

    def read(self, name: str) -> Tensor:
        return self.tensors[name] if name in self.tensors else super().read(name)


def write_quantized_folder(path: Path, checkpoint: TinyCheckpoint, method: str) -> QuantizedFolder:
    """Write a folder whose linear layers are random numbers of a method; its embedding and head stay dense."""
    tensors = {}
    dense = {}
    for i, name in enumerate(sorted(checkpoint.names())):
        x = checkpoint.read(name)
        if not name.endswith("proj.weight"):
            tensors[name] = x.contiguous()
            continue
        packed, dense[name] = PACKERS[method](*x.shape, i)
        tensors |= {name.removesuffix(".weight") + ending: part for ending, part in packed.items()}
    save_file(tensors, path / "model.safetensors")
    config = checkpoint.config | {"quantization_config": METHODS[method]}
    (path / "config.json").write_text(json.dumps(config))
    return QuantizedFolder(path, ReplacedTensors(checkpoint, dense), dense)


def pack(numbers: NDArray[Any], bits: int) -> Tensor:
    """Pack numbers [n, m] into words [n, ceil(m bits / 32)], the first of a word in its lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.uint32)
    for j in range(numbers.shape[1]):
        words[:, j // per_word] |= numbers[:, j].astype(np.uint32) << np.uint32(j % per_word * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def count_groups(width: int) -> int:
    """Return the number of groups of 32 inputs, or of all where there are fewer."""
    return max(1, width // 32)


def draw(out: int, width: int, groups: int, bits: int, seed: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Draw numbers [out, in], zeros [out, groups], and scales [out, groups], float16."""
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 1 << bits, (out, width))
    zero = rng.integers(1 << bits - 2, 3 << bits - 2, (out, groups))
    scale = rng.uniform(0.4, 1.2, (out, groups)) * 4 / (1 << bits) / width**0.5
    return q, zero, scale.astype(np.float16)


def mean(q: NDArray[Any], zero: NDArray[Any], scale: NDArray[Any], order: NDArray[Any] | None = None) -> Tensor:
    """Return what the numbers mean; `order` is the group of each input."""
    order = np.arange(q.shape[1]) * scale.shape[1] // q.shape[1] if order is None else order
    w = (q - zero[:, order]).astype(np.float32) * scale.astype(np.float32)[:, order]
    return torch.from_numpy(w)


def pack_awq(out: int, width: int, seed: int) -> Packed:
    q, zero, scale = draw(out, width, count_groups(width), 4, seed)

    def words(numbers: NDArray[Any]) -> Tensor:
        padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 8)))
        order = np.concatenate([8 * i + np.array(AWQ_ORDER) for i in range(padded.shape[1] // 8)])
        return pack(padded[:, order], 4)

    tensors = {".qweight": words(q.T), ".qzeros": words(zero.T), ".scales": torch.from_numpy(scale.T.copy())}
    return tensors, mean(q, zero, scale)


def pack_gptq(
    bits: int = 4, offset: int = 1, one_group: bool = False, symmetric: bool = False, shuffled: bool = False
) -> Packer:
    def pack_matrix(out: int, width: int, seed: int) -> Packed:
        q, zero, scale = draw(out, width, 1 if one_group else count_groups(width), bits, seed)
        zero[::3] = 0  # words of the first version then borrow
        if symmetric:
            zero[:] = 1 << bits - 1
        order = np.arange(width) * scale.shape[1] // width
        if shuffled:
            order = np.random.default_rng(seed).permutation(order)
        tensors = {
            ".qweight": pack(q, bits).T.contiguous(),
            ".qzeros": pack(zero.T, bits) - offset * sum(1 << i for i in range(0, 32, bits)),
            ".scales": torch.from_numpy(scale.T.copy()),
            ".g_idx": torch.from_numpy(order.astype(np.int32)),
        }
        return tensors, mean(q, zero, scale, order)

    return pack_matrix


def pack_words(bits: int = 4, zeros: bool = False, channel: bool = False, shuffled: bool = False) -> Packer:
    def pack_matrix(out: int, width: int, seed: int) -> Packed:
        q, zero, scale = draw(out, width, 1 if channel else count_groups(width), bits, seed)
        if not zeros:
            zero[:] = 1 << bits - 1
        tensors = {
            ".weight_packed": pack(q, bits),
            ".weight_scale": torch.from_numpy(scale),
            ".weight_shape": torch.tensor((out, width)),
        }
        order = np.arange(width) * scale.shape[1] // width
        if zeros:
            tensors[".weight_zero_point"] = pack(zero.T, bits).T.contiguous()
        if shuffled:
            order = np.random.default_rng(seed).permutation(order)
            tensors[".weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
        return tensors, mean(q, zero, scale, order)

    return pack_matrix


def pack_int8(out: int, width: int, seed: int, zeros: bool = False) -> Packed:
    q, zero, scale = draw(out, width, 1, 8, seed)
    tensors = {".weight": torch.from_numpy((q - 128).astype(np.int8)), ".weight_scale": torch.from_numpy(scale)}
    if zeros:
        tensors[".weight_zero_point"] = torch.from_numpy((zero - 128).astype(np.int8))
    else:
        zero[:] = 128
    return tensors | {".input_scale": torch.ones(1)}, mean(q, zero, scale)


def pack_fp8(ending: str, block: tuple[int, int] | None, by_row: bool = False) -> Packer:
    def pack_matrix(out: int, width: int, seed: int) -> Packed:
        rng = torch.Generator().manual_seed(seed)
        weight = (torch.randn(out, width, generator=rng) * 40).to(torch.float8_e4m3fn)
        rows, columns = block or (1 if by_row else out, width)
        shape = (-(-out // rows), -(-width // columns))
        scale = (torch.rand(shape, generator=rng) + 0.5) * 2 / 40 / width**0.5
        w = weight.float()
        for i in range(out):
            for j in range(0, width, columns):
                w[i, j : j + columns] *= scale[i // rows, j // columns]
        return {".weight": weight, ending: scale if block or by_row else scale.reshape(())}, w

    return pack_matrix


PACKERS: dict[str, Packer] = {
    "fp8": pack_fp8(".weight_scale_inv", (16, 24)),
    "fp8-tensor": pack_fp8(".weight_scale", None),
    "awq": pack_awq,
    "gptq": pack_gptq(),
    "gptq-order": pack_gptq(shuffled=True),
    "gptq-v2": pack_gptq(offset=0, one_group=True),
    "gptq-8": pack_gptq(8, symmetric=True),
    "ct-int4": pack_words(),
    "ct-int4-zeros": pack_words(zeros=True),
    "ct-int4-channel": pack_words(channel=True),
    "ct-int4-order": pack_words(shuffled=True),
    "ct-int8-packed": pack_words(8),
    "ct-int8": pack_int8,
    "ct-fp8": pack_fp8(".weight_scale", None, by_row=True),
    "ct-fp8-block": pack_fp8(".weight_scale", (16, 24)),
}
