"""Experts in MXFP4, as the published files of gpt-oss have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from retain.formats.safetensors import SafetensorsCheckpoint
from retain.kernels.cpu.memory import Arena
from retain.kernels.cpu.packing import pack_weight
from retain.kernels.weights.quantized import MXFP4, Int8, Kind
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.quantized_folders import ReplacedTensors
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

MATRICES = ("gate_up_proj", "down_proj")


def random_mxfp4(n: int, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks [n, rows, columns / 32, 16] and scales [n, rows, columns / 32] of numbers between -0.75 and 0.75."""
    rng = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (n, rows, columns // 32, 16), generator=rng, dtype=torch.uint8)
    return blocks, torch.randint(120, 125, (n, rows, columns // 32), generator=rng, dtype=torch.uint8)


def write_folder(path: Path, checkpoint: TinyCheckpoint) -> dict[str, tuple[Tensor, Tensor]]:
    """Write a folder whose experts are random MXFP4; returns these by name."""
    tensors = {name: checkpoint.read(name).contiguous() for name in checkpoint.names()}
    quantized = {}
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        n, columns, rows = tensors.pop(name).shape
        quantized[name] = random_mxfp4(n, rows, columns, seed=len(quantized))
    named = ("blocks", "scales")
    parts = {f"{name}_{part}": x for name, both in quantized.items() for part, x in zip(named, both, strict=True)}
    save_file(tensors | parts, path / "model.safetensors")
    config = checkpoint.config | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    return quantized


@pytest.mark.slow
def test_a_folder_with_mxfp4_experts_equals_the_dense_one(tmp_path: Path) -> None:
    """transformers converts the experts to dense matrices; the rest of the model is equal."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    checkpoint = tiny_checkpoint("gpt_oss", intermediate_size=64)
    quantized = write_folder(tmp_path, checkpoint)
    dense = {name: convert_moe_packed_tensors(*both, dtype=torch.float32) for name, both in quantized.items()}
    folder = SafetensorsCheckpoint(tmp_path)
    assert folder.names() == checkpoint.names()
    for name, x in dense.items():
        blocks = folder.read_stored(name)
        assert blocks is not None
        stored = replace(blocks, kind=torch.float32).unpack()
        assert isinstance(stored, Tensor) and torch.equal(stored, x.transpose(1, 2).flatten(0, 1))
    models = [build_model(Weights(c, torch.float32)) for c in (folder, ReplacedTensors(checkpoint, dense))]
    ours, expected = (run_decoder(model, [random_tokens(20)], [[20]])[0] for model in models)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_damaged_blocks_are_one_line(tmp_path: Path, change: str) -> None:
    checkpoint = tiny_checkpoint("gpt_oss", intermediate_size=64)
    write_folder(tmp_path, checkpoint)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][..., :8].contiguous() if change == "shape" else tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj' is damaged: blocks and scales of the shapes"):
        build_model(Weights(SafetensorsCheckpoint(tmp_path), torch.float32))


@pytest.mark.parametrize("kind", [MXFP4, Int8, torch.bfloat16], ids=str)
def test_packed_experts_equal_the_unpacked_ones(tmp_path: Path, kind: Kind) -> None:
    """C++ unpacks ggml's form of them; of selected rows, too."""
    write_folder(tmp_path, tiny_checkpoint("gpt_oss", intermediate_size=64))
    stored = SafetensorsCheckpoint(tmp_path).read_stored("model.layers.0.mlp.experts.down_proj")
    assert stored is not None
    order = torch.randperm(stored.shape[0], generator=torch.Generator().manual_seed(0))
    for weight in (stored, stored[order]):
        weight = replace(weight, kind=kind)
        assert torch.equal(pack_weight(weight, Arena()).data, pack_weight(weight.unpack(), Arena()).data)
