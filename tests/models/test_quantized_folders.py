"""Quantized Hugging Face folders: the model of a folder is that of the dense matrices which its tensors mean."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from retain.formats.checkpoint import open_checkpoint
from retain.formats.errors import UnsupportedError
from retain.formats.safetensors import SafetensorsCheckpoint
from retain.kernels.cpu.memory import Arena
from retain.kernels.cpu.packing import pack_weight
from retain.kernels.weights.quantized import Int4, Int8
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import concat_rows, dense_chunks, dequantize, unpack
from retain.models.weights import Weights
from tests.helpers import counted_work
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.folders import save_model_folder
from tests.helpers.quantized_folders import METHODS, write_quantized_folder
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint
from tests.models.test_parser_fuzzing import fuzz

KINDS = {"fp8": torch.bfloat16, "gptq-order": torch.bfloat16, "ct-int4-order": torch.bfloat16}
KINDS |= dict.fromkeys(("fp8-tensor", "ct-fp8", "ct-fp8-block"), torch.bfloat16)
KINDS |= dict.fromkeys(("gptq-8", "ct-int8-packed", "ct-int8"), Int8)
MATRIX = "model.layers.0.mlp.down_proj.weight"


def small(model_type: str = "llama") -> TinyCheckpoint:
    return tiny_checkpoint(model_type, num_hidden_layers=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_folder_computes_what_its_tensors_mean(tmp_path: Path, method: str) -> None:
    """In float32 the numbers are those of the tensors; in auto a matrix keeps its bits where a kind holds them."""
    folder = write_quantized_folder(tmp_path, small(), method)
    ours = open_checkpoint(tmp_path)
    assert ours.names() == folder.dense.names()
    for name, expected in folder.quantized.items():
        assert torch.equal(ours.read(name), expected)
    models = [build_model(Weights(c, torch.float32)) for c in (ours, folder.dense)]
    logits, expected = (run_decoder(model, [random_tokens(12)], [[12]])[0] for model in models)
    assert torch.equal(logits, expected)
    for name, dense in folder.quantized.items():
        weight = Weights(ours, torch.bfloat16).load_matrix(name)
        assert isinstance(weight, StoredWeight)
        assert weight.kind is KINDS.get(method, Int4)
        error = (dequantize(weight) - dense).abs().max()
        assert error <= (2**-8 if weight.kind is torch.bfloat16 else 2**-10) * dense.abs().max()
        eight = Weights(ours, torch.bfloat16, "int8").load_matrix(name)
        assert isinstance(eight, StoredWeight) and eight.kind is Int8
        assert (dequantize(eight) - dense).abs().max() <= dense.abs().max() / 127


def test_groups_of_inputs_that_are_not_set_are_adjacent(tmp_path: Path) -> None:
    """compressed-tensors saves the -1 with which it begins where inputs were not sorted."""
    folder = write_quantized_folder(tmp_path, small(), "ct-int4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{MATRIX}_g_idx"] = torch.full((folder.quantized[MATRIX].shape[1],), -1, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(open_checkpoint(tmp_path).read(MATRIX), folder.quantized[MATRIX])


@pytest.mark.parametrize("method", ["ct-fp8", "ct-fp8-block"])
def test_one_scheme_may_have_blocks_and_another_none(tmp_path: Path, method: str) -> None:
    folder = write_quantized_folder(tmp_path, small(), method)
    groups = {"a": {"weights": {"strategy": "channel"}}, "b": {"weights": {"block_structure": [16, 24]}}}
    quantization = METHODS[method] | {"config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps(small().config | {"quantization_config": quantization}))
    assert torch.equal(open_checkpoint(tmp_path).read(MATRIX), folder.quantized[MATRIX])


@pytest.mark.parametrize("method", ["awq", "gptq", "ct-int4-zeros", "fp8", "ct-int8"])
def test_experts_of_their_own_modules(tmp_path: Path, method: str) -> None:
    folder = write_quantized_folder(tmp_path, small("qwen3_moe"), method)
    models = [build_model(Weights(c, torch.float32)) for c in (open_checkpoint(tmp_path), folder.dense)]
    logits, expected = (run_decoder(model, [random_tokens(12)], [[12]])[0] for model in models)
    assert torch.equal(logits, expected)
    assert any(".experts.1." in name for name in folder.quantized)


@pytest.mark.parametrize("method", ["awq", "gptq", "ct-int4-zeros", "ct-int8", "fp8", "gptq-order"])
@pytest.mark.parametrize("chunk", [1, 2**25])
def test_packing_in_chunks_equals_packing_at_once(
    tmp_path: Path, method: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cpu backend converts chunks of rows, selected ones too, and gives each back to the system."""
    monkeypatch.setattr("retain.kernels.cpu.packing.RELEASE_BYTES", chunk)
    write_quantized_folder(tmp_path, small(), method)
    w = Weights(open_checkpoint(tmp_path), torch.bfloat16)
    weight = w.load_matrix("model.layers.0.mlp.up_proj.weight")
    assert isinstance(weight, StoredWeight)
    index = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(1))
    for matrix in (weight, weight[index]):
        assert torch.equal(pack_weight(matrix, Arena()).data, pack_weight(matrix.unpack(), Arena()).data)


@pytest.mark.parametrize("num_elements", [1, 700, 2**20])
def test_chunks_of_a_matrix_are_the_matrix(tmp_path: Path, num_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored, stacked, unpacked or dense: the rows in their order, in float32."""
    monkeypatch.setattr("retain.kernels.weights.weight.CHUNK_ELEMENTS", num_elements)
    write_quantized_folder(tmp_path, small(), "ct-int4")
    w = Weights(open_checkpoint(tmp_path), torch.bfloat16)
    stored = [w.load_matrix(f"model.layers.0.self_attn.{name}_proj.weight") for name in ("q", "k")]
    both = concat_rows(stored)
    dense = w.load_matrix("model.embed_tokens.weight")
    for weight in (both, unpack(both), dense, unpack(dense)):
        chunks = list(dense_chunks(weight))
        assert torch.equal(torch.cat(chunks), dequantize(weight))
        assert max(map(len, chunks)) <= max(num_elements // weight.shape[1], 1)


def test_a_head_is_compared_with_its_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retain.kernels.weights.weight.CHUNK_ELEMENTS", 100)
    save_model_folder(tmp_path, small())
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    other = table.clone()
    other[-1, -1] += 1
    matrices = {"a": table, "b": table.clone(), "c": other, "d": table[1:].clone(), "e": table.bfloat16()}
    save_file(matrices, tmp_path / "model.safetensors")
    w = Weights(open_checkpoint(tmp_path), torch.bfloat16)
    assert [w.equal("a", name) for name in "abcde"] == [True, True, False, False, False]


@pytest.mark.slow
def test_stacked_matrices_with_block_scales(tmp_path: Path) -> None:
    """transformers saves the experts of a layer as one tensor with scales of its own."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 40, 64, generator=rng).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 3, 3, generator=rng)
    config = small().config | {"quantization_config": METHODS["fp8"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"experts.x": weight, "experts.x_scale_inv": scale}, tmp_path / "model.safetensors")
    expected = _dequantize_fp8_weight(weight, scale, [16, 24], torch.float32)
    assert torch.equal(open_checkpoint(tmp_path).read("experts.x"), expected.flatten(0, 1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ({"quant_method": ["x"]}, "x"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, format gptq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transforms"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}}, "of 3 bits"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ("x" * 5000, "xxx"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, config: Any, message: str) -> None:
    save_model_folder(tmp_path, small())
    (tmp_path / "config.json").write_text(json.dumps(small().config | {"quantization_config": config}))
    with pytest.raises(UnsupportedError, match=message) as e:
        SafetensorsCheckpoint(tmp_path)
    assert str(e.value).startswith(str(tmp_path)) and "\n" not in str(e.value)
    assert str(e.value).endswith("use a .gguf file, or the original") and len(str(e.value)) < len(str(tmp_path)) + 250


@pytest.mark.parametrize("block", [[0, 128], [128], "x", [128, 2**40], [1.5, 2], [True, 128]])
def test_blocks_out_of_bounds_are_refused(tmp_path: Path, block: Any) -> None:
    write_quantized_folder(tmp_path, small(), "fp8")
    quantization = METHODS["fp8"] | {"weight_block_size": block}
    (tmp_path / "config.json").write_text(json.dumps(small().config | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match="not two whole numbers from 1 to 65536"):
        SafetensorsCheckpoint(tmp_path)


def change_tensors(path: Path, changes: dict[str, Tensor | None]) -> str:
    """Return the error of a folder some of whose tensors are replaced or removed."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError) as e:
        SafetensorsCheckpoint(path).read(MATRIX)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        *(("awq", "qzeros"), ("awq", "scales"), ("gptq", "qweight"), ("fp8", "weight")),
        *(("ct-int4", "weight_scale"), ("ct-int4", "weight_shape"), ("ct-int4-zeros", "weight_shape")),
    ],
)
def test_half_of_a_matrix_is_damage(tmp_path: Path, method: str, missing: str) -> None:
    write_quantized_folder(tmp_path, small(), method)
    message = change_tensors(tmp_path, {MATRIX.replace("weight", missing): None})
    assert f"damaged: the matrix '{MATRIX}' has" in message and f"but no {missing}" in message


@pytest.mark.parametrize("method", ["awq", "gptq", "ct-int4"])
def test_a_matrix_that_is_there_twice_is_damage(tmp_path: Path, method: str) -> None:
    write_quantized_folder(tmp_path, small(), method)
    assert f"the tensor '{MATRIX}' is there twice" in change_tensors(tmp_path, {MATRIX: torch.ones(64, 128)})


def test_a_scale_that_is_missing_is_damage(tmp_path: Path) -> None:
    write_quantized_folder(tmp_path, small(), "fp8")
    assert "is of torch.float8_e4m3fn" in change_tensors(tmp_path, {f"{MATRIX}_scale_inv": None})


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_do_not_fit_are_one_line(tmp_path: Path, method: str) -> None:
    """Each part of a matrix with another shape or type."""
    folder = write_quantized_folder(tmp_path, small(), method)
    intact = load_file(tmp_path / "model.safetensors")
    stem = MATRIX.removesuffix("weight")
    parts = [n for n in intact if n.startswith(stem) and not n.endswith("input_scale")]
    for name in parts:
        for change in (torch.ones(3, 5), torch.ones(7, dtype=torch.int64), torch.ones(0, 4, dtype=torch.int32)):
            assert f"the tensor '{MATRIX}' is damaged" in change_tensors(tmp_path, {name: change})
        save_file(intact, tmp_path / "model.safetensors")
    assert torch.equal(open_checkpoint(tmp_path).read(MATRIX), folder.quantized[MATRIX])


def test_scales_that_are_not_finite_are_one_line(tmp_path: Path) -> None:
    write_quantized_folder(tmp_path, small(), "gptq")
    name = MATRIX.replace("weight", "scales")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    weight = Weights(open_checkpoint(tmp_path), torch.bfloat16).load_matrix(MATRIX)
    assert isinstance(weight, StoredWeight)
    with pytest.raises(ValueError, match=rf"{MATRIX}' cannot be loaded: the scale of a group"):
        weight.unpack()


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq-order", "ct-int4-zeros"])
def test_damaged_quantized_folders_are_read_or_refused(tmp_path: Path, method: str) -> None:
    write_quantized_folder(tmp_path, tiny_checkpoint("llama", num_hidden_layers=1), method)

    def use() -> None:
        ours = open_checkpoint(tmp_path)
        for name in ours.names():
            ours.read(name)
            if (stored := ours.read_stored(name)) is not None:
                stored.unpack()

    for file, header_size in (("config.json", 600), ("model.safetensors", 3000)):
        assert fuzz(use, tmp_path / file, header_size, cases=120) > 0.05


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq-order", "ct-int4-zeros"])
def test_damaged_values_of_tensors_are_read_or_refused(tmp_path: Path, method: str) -> None:
    """Shapes, groups of inputs and scales of random bytes."""
    write_quantized_folder(tmp_path, tiny_checkpoint("llama", num_hidden_layers=1), method)
    intact = load_file(tmp_path / "model.safetensors")
    rng = random.Random(0)
    for case in range(60):
        tensors = {name: x.clone() for name, x in intact.items()}
        name = rng.choice([n for n in tensors if "proj" in n])
        raw = tensors[name].view(-1).view(torch.uint8)
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        save_file(tensors, tmp_path / "model.safetensors")
        ours = open_checkpoint(tmp_path)
        matrix = ".".join(name.split(".")[:-1]) + ".weight"
        try:
            with counted_work.at_most(10_000):
                stored = ours.read_stored(matrix)
                assert stored is not None
                stored.unpack()
        except ValueError as e:
            assert str(e).startswith(str(tmp_path)) and "\n" not in str(e), case
