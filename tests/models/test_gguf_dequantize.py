"""Quantized matrices keep the file's values, other kinds are quantized on loading, and damage is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from retain import models
from retain.config import Config
from retain.formats.gguf import GGUFCheckpoint
from retain.formats.gguf.architecture import load_architecture
from retain.formats.gguf.types import GGML_BLOCK_SIZES
from retain.kernels import reference
from retain.kernels.api import CPU
from retain.kernels.weights.ggml_blocks import convert_blocks, dequantize_blocks, is_supported, stored_kind
from retain.kernels.weights.quantized import (
    IQ4,
    MXFP4,
    NVFP4,
    Int4,
    Int5,
    Int6,
    Int8,
    QuantizedWeight,
    ShiftedWeight,
    quantize_int4,
    quantize_int8,
)
from retain.kernels.weights.weight import unpack
from retain.models.resolve import resolve_model
from retain.models.weights import Weights, open_weights
from tests.helpers.decoder_runner import ReferenceModel, build_model, random_tokens, run_decoder
from tests.helpers.folders import save_model_folder
from tests.helpers.gguf_files import FLOAT_TYPES, GGUF_ARCHS, add_metadata, tiny_for_gguf, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint
from tests.models.test_quantized_weights import expand_groups, matrices_equal

EXACT_TYPES: dict[str, type[QuantizedWeight]] = {
    **{"Q4_0": Int4, "Q4_1": Int4, "Q5_0": Int5, "Q5_1": Int5, "Q8_0": Int8},
    **{"IQ4_NL": IQ4, "MXFP4": MXFP4, "NVFP4": NVFP4},
}
# Their scales, and shifts, are products of two numbers, which float16 rounds.
ROUNDED_TYPES: dict[str, type[QuantizedWeight]] = {
    "Q4_K": Int4,
    "Q5_K": Int5,
    "Q3_K": Int6,
    "Q6_K": Int6,
    "IQ4_XS": IQ4,
}
WRITABLE_TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
WRITTEN_TYPES = [name for name in EXACT_TYPES if name[0] == "Q"]  # by the library
BLOCK_TYPES = [t for t in FLOAT_TYPES if GGML_BLOCK_SIZES[t][0] > 1 and is_supported(t)]
SCALE_OFFSETS = {  # of the float16 scales in a block, in bytes
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]},
    **{"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": []},
}


def random_blocks(ggml_type: GGMLQuantizationType, count: int, random_scales: bool = False) -> np.ndarray[Any, Any]:
    """Draw the bytes of `count` blocks, uint8 [n]. The scales are normally distributed, or random bytes too."""
    rng, block_bytes = np.random.default_rng(int(ggml_type)), GGML_BLOCK_SIZES[ggml_type][1]
    raw = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for at in [] if random_scales else SCALE_OFFSETS[ggml_type.name]:
        raw[:, at : at + 2] = rng.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    if ggml_type.name == "MXFP4" and not random_scales:
        raw[:, 0] = rng.integers(110, 140, count)  # exponents
    return raw.reshape(-1)


# Blocks


@pytest.mark.parametrize("name", SCALE_OFFSETS)
def test_unpacked_values_equal_the_dequantized_ones(name: str) -> None:
    """Exactly for equal groups, up to rounding of scales that are products, up to half a step for all others."""
    ggml = GGMLQuantizationType[name]
    shape = (6, 2 * GGML_BLOCK_SIZES[ggml][0])
    raw = random_blocks(ggml, 12)
    expected, matrix = dequantize_blocks(raw, ggml, shape), convert_blocks(raw, ggml, shape, stored_kind(ggml))
    assert not isinstance(matrix, Tensor) and matrix.shape == shape and expected.abs().max() > 1
    if name in EXACT_TYPES:
        assert isinstance(matrix, EXACT_TYPES[name]) and torch.equal(matrix.dequantize(), expected)
    elif name in ROUNDED_TYPES:
        assert isinstance(matrix, ROUNDED_TYPES[name])
        error = (matrix.dequantize() - expected).abs()
        if isinstance(matrix, ShiftedWeight):
            largest = expand_groups(31 * matrix.scale.float().abs() + matrix.shift.float().abs())
            assert (error <= largest * 2**-11 + 2**-19).all()
        else:
            assert (error <= expected.abs() * 2**-11 + 2**-18).all()
    else:
        assert matrices_equal(matrix, quantize_int8(expected))
        assert ((matrix.dequantize() - expected).abs() <= expand_groups(matrix.scale) * 0.57).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"])
def test_int8_holds_the_values_of_groups_of_32_without_shifts(name: str) -> None:
    """So matrices of these types lose nothing where they are stacked."""
    ggml = GGMLQuantizationType[name]
    raw = random_blocks(ggml, 12)
    matrix = convert_blocks(raw, ggml, (6, 64), Int8)
    assert isinstance(matrix, Int8) and torch.equal(matrix.dequantize(), dequantize_blocks(raw, ggml, (6, 64)))


@pytest.mark.parametrize("ggml_type", BLOCK_TYPES, ids=lambda t: t.name)
def test_random_blocks_are_unpacked_or_refused(ggml_type: GGMLQuantizationType) -> None:
    block_size, block_bytes = GGML_BLOCK_SIZES[ggml_type]
    raw = random_blocks(ggml_type, 40, random_scales=True).reshape(-1, block_bytes)
    for block in raw:
        try:
            matrix = convert_blocks(block, ggml_type, (1, block_size), stored_kind(ggml_type))
        except ValueError as e:
            assert "\n" not in str(e)
        else:
            assert not isinstance(matrix, Tensor) and matrix.dequantize().isfinite().all()


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_dense_matrices_and_vectors_are_not_blocks(tmp_path: Path, stored: str) -> None:
    dense = GGUFCheckpoint(write_gguf(tmp_path / "dense.gguf", tiny_for_gguf("llama"), stored))
    blocks = GGUFCheckpoint(write_gguf(tmp_path / "blocks.gguf", tiny_for_gguf("llama"), "Q8_0"))
    for name in dense.names():
        assert dense.read_stored(name) is None
        assert (blocks.read_stored(name) is None) == (blocks.read(name).ndim == 1)


@pytest.mark.parametrize(("name", "scale"), [("Q4_0", np.inf), ("Q4_0", 60000), ("Q8_0", np.nan), ("Q5_0", -np.inf)])
def test_infinite_scales_are_refused(name: str, scale: float) -> None:
    ggml = GGMLQuantizationType[name]
    raw = random_blocks(ggml, 3)
    at = GGML_BLOCK_SIZES[ggml][1]
    raw[at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not finite in float16"):
        convert_blocks(raw, ggml, (3, 32), stored_kind(ggml))


# Files


def first_of_each_layout() -> list[str]:
    """Return a family for each way to move or turn matrices: the first architecture that does."""
    found: dict[Any, str] = {}
    for model_type, name in GGUF_ARCHS.items():
        arch = load_architecture(name)
        orders = [None if "lambda" in f.__qualname__ else f for f in (arch.row_order, arch.column_order)]
        found.setdefault((*orders, arch.transposed, arch.stacked), model_type)
    return [*found.values()]


def test_layouts_of_matrices_are_those_that_are_known() -> None:
    expected = ["llama", "qwen2", "qwen3_5_text", "gpt2", "gpt_neox", "deepseek_v2"]
    assert first_of_each_layout() == expected


@pytest.mark.parametrize("ggml_type", WRITTEN_TYPES)
@pytest.mark.parametrize("model_type", first_of_each_layout())
def test_every_layout_keeps_the_quantized_values_of_every_type(tmp_path: Path, model_type: str, ggml_type: str) -> None:
    check_values_kept(GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), ggml_type)))


@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_every_architecture_keeps_its_quantized_values(tmp_path: Path, model_type: str) -> None:
    """One file has matrices of all types in turn: what a type means depends on layouts alone."""
    check_values_kept(GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), WRITTEN_TYPES)))


def check_values_kept(ours: GGUFCheckpoint) -> None:
    """Compare each matrix in the file's bits with the dequantized one, in Hugging Face's order."""
    exact = ("gate.weight", "router.weight", "conv1d.weight", "conv.conv.weight")
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored [in, out] by Hugging Face
    for name in ours.names():
        expected, transposed = ours.read(name), name.endswith(conv1d)
        blocks = ours.read_stored(name, transposed)
        is_exact = expected.ndim < 2 or name.endswith(exact)
        assert (blocks is None) == is_exact, name
        if blocks is None:
            continue
        matrix = blocks.unpack()
        ggml_type = GGMLQuantizationType(ours._tensor_infos[name][1].ggml_type).name
        assert isinstance(matrix, EXACT_TYPES[ggml_type]), name
        assert torch.equal(matrix.dequantize(), expected.T if transposed else expected.flatten(0, -2)), name


def nvfp4_tensors(name: str, shape: tuple[int, ...], scales: list[float]) -> dict[str, Any]:
    """Return a matrix of random blocks with its scales, as the converter writes those of ModelOpt."""
    raw = random_blocks(GGMLQuantizationType.NVFP4, int(np.prod(shape)) // 64).reshape(*shape[:-1], -1)
    return {
        f"{name}.weight": (raw, GGMLQuantizationType.NVFP4),
        f"{name}.scale": np.array(scales, np.float32),
        f"{name}.input_scale": np.full(len(scales), 7.0, np.float32),
    }


@pytest.mark.parametrize(
    ("model_type", "name", "shape", "scales", "hf_names"),
    [
        ("llama", "blk.0.attn_q", (64, 64), [0.0123], ["self_attn.q_proj"]),
        (
            "qwen3_moe",
            "blk.0.ffn_up_exps",
            (6, 32, 64),
            [0.01 * (i + 1) for i in range(6)],
            [f"mlp.experts.{i}.up_proj" for i in range(6)],
        ),
    ],
)
def test_scales_of_whole_tensors_multiply_nvfp4(
    tmp_path: Path, model_type: str, name: str, shape: tuple[int, ...], scales: list[float], hf_names: list[str]
) -> None:
    """Of quantized matrices they multiply the scales of groups, which are rounded to float16."""
    tensors = nvfp4_tensors(name, shape, scales)
    tiny = tiny_for_gguf(model_type)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "scaled.gguf", tiny, tensors=tensors))
    tensors |= {f"{name}.scale": None, f"{name}.input_scale": None}
    plain = GGUFCheckpoint(write_gguf(tmp_path / "plain.gguf", tiny, tensors=tensors))
    assert ours.names() == plain.names()
    for hf_name, scale in zip((f"model.layers.0.{n}.weight" for n in hf_names), scales, strict=True):
        expected = plain.read(hf_name) * np.float32(scale)
        assert torch.equal(ours.read(hf_name), expected)
        stored = ours.read_stored(hf_name)
        assert stored is not None
        matrix = stored.unpack()
        assert isinstance(matrix, NVFP4)
        torch.testing.assert_close(matrix.dequantize(), expected, rtol=1e-3, atol=5e-7)
        for dtype in (torch.float32, torch.bfloat16):
            dense = replace(stored, kind=dtype).unpack()
            assert isinstance(dense, Tensor) and torch.equal(dense, expected.to(dtype))
        assert isinstance(replace(stored, kind=Int8).unpack(), Int8)


@pytest.mark.parametrize("scales", [[0.1] * 2, [float("nan")], [[0.1, float("inf"), 0.1, 0.1, 0.1, 0.1]]])
def test_other_scales_of_whole_tensors_are_refused(tmp_path: Path, scales: list[Any]) -> None:
    tensors = nvfp4_tensors("blk.0.ffn_up_exps", (6, 32, 64), scales)
    with pytest.raises(ValueError, match="not a finite number for each matrix of ") as e:
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("qwen3_moe"), tensors=tensors))
    assert "\n" not in str(e.value)


def write_dequantized(path: Path, source: Path) -> Path:
    """Write a copy of a file whose tensors the library dequantized."""
    reader = gguf.GGUFReader(source)
    w = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            add_metadata(w, name, field.contents())
    for tensor in reader.tensors:
        w.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_quantized_files_give_the_logits_of_their_dequantized_weights(tmp_path: Path, model_type: str) -> None:
    """One file has matrices of all types in turn: what a type means does not depend on the architecture."""
    source = write_gguf(tmp_path / "quantized.gguf", tiny_for_gguf(model_type), WRITABLE_TYPES)
    assert {t.tensor_type.name for t in gguf.GGUFReader(source).tensors} == {"F32", *WRITABLE_TYPES}
    paths = (source, write_dequantized(tmp_path / "dense.gguf", source))
    text = random_tokens(12)
    ours, expected = (run_decoder(build_model(open_weights(p, torch.float32)), [text], [[12]])[0] for p in paths)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_matrices_of_several_types_keep_their_numbers(tmp_path: Path, model_type: str) -> None:
    """q, k and v, or gate and up, are of types of which none holds another's numbers. Experts are stacked in int8."""
    checkpoint = tiny_for_gguf(model_type)
    has_experts = any("expert" in name for name in checkpoint.names())
    types = ["Q8_0", "MXFP4", "Q5_0", "Q4_0"] if has_experts else ["Q4_1", "MXFP4", "Q5_1", "Q8_0"]
    source = write_gguf(tmp_path / "quantized.gguf", checkpoint, types)
    dense = build_model(open_weights(write_dequantized(tmp_path / "dense.gguf", source), torch.float32))
    program = reference.program(torch.float32, CPU)
    w = Weights(GGUFCheckpoint(source), torch.bfloat16, vector_dtype=torch.float32)  # float32 would make them dense
    model = ReferenceModel(models.build(w, program), program)
    ours, expected = (run_decoder(m, [random_tokens(12)], [[12]])[0] for m in (model, dense))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_library_writes_no_other_types() -> None:
    """A type that a version of it learns belongs into the list. Blocks of 256 are wider than the tiny models."""
    for ggml_type in BLOCK_TYPES:
        try:
            gguf.quants.quantize(np.ones((1, 256), np.float32), ggml_type)
        except NotImplementedError:
            assert ggml_type.name not in WRITABLE_TYPES
        else:
            assert ggml_type.name in WRITABLE_TYPES or GGML_BLOCK_SIZES[ggml_type][0] == 256


def test_matrices_stored_the_other_way_round_are_not_blocks(tmp_path: Path) -> None:
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("gpt2"), "Q8_0"))
    for name, transposed in (("transformer.h.0.mlp.c_fc.weight", False), ("transformer.wte.weight", True)):
        assert ours.read_stored(name, transposed) is None
        assert ours.read_stored(name, not transposed) is not None


def test_types_without_a_definition_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0")
    assert not is_supported(GGMLQuantizationType.Q8_1) and is_supported(GGMLQuantizationType.IQ4_XS)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    type_at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[type_at] == GGMLQuantizationType.Q8_0
    data[type_at] = GGMLQuantizationType.Q8_1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.gguf: (tensors of type Q8_1 are not supported|damaged)"):
        GGUFCheckpoint(path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_bundled_models_keep_their_quantized_values(model: str) -> None:
    checkpoint = GGUFCheckpoint(resolve_model(model))
    for name in checkpoint.names():
        if not name.endswith("proj.weight") or ".layers.1." not in name:
            continue
        expected, blocks = checkpoint.read(name), checkpoint.read_stored(name)
        assert blocks is not None
        matrix = blocks.unpack()
        assert not isinstance(matrix, Tensor)
        error = (matrix.dequantize() - expected).abs()
        scale = matrix.scale.float().repeat_interleave(matrix.GROUP, 1).abs()
        assert error.max() < 0.003 and (error <= 0.51 * scale).all(), name
        if model == "smollm2":
            assert isinstance(matrix, Int4) and not error.any()
    embedding = checkpoint.read_stored("model.embed_tokens.weight")
    assert embedding is not None and embedding.kind is Int8


# The chosen kind


UP_PROJ, EMBEDDING, NORM = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize("stored", ["F32", "BF16", "Q8_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("quantization", ["auto", "bf16", "int8", "int4"])
def test_matrices_are_of_the_chosen_kind(tmp_path: Path, stored: str, quantization: str) -> None:
    w = open_weights(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), stored), torch.bfloat16, quantization)
    in_file = {"Q8_0": Int8, "Q4_1": Int4, "Q5_1": Int5}.get(stored, Tensor)
    for name, embedding in ((UP_PROJ, False), (EMBEDDING, True)):
        kinds = {"auto": in_file, "bf16": Tensor, "int8": Int8, "int4": Int8 if embedding else Int4}
        kind = kinds[quantization]
        matrix, expected = unpack(w.load_matrix(name, embedding)), w.checkpoint.read(name).float()
        assert isinstance(matrix, kind)
        if kind is Tensor:
            assert matrices_equal(matrix, expected.bfloat16())
        elif kind is in_file:
            assert torch.equal(matrix.dequantize(), expected)
        else:
            assert matrices_equal(matrix, (quantize_int4 if kind is Int4 else quantize_int8)(expected))
    assert w[NORM].dtype == w[UP_PROJ].dtype == torch.bfloat16
    assert w.scope("model.").quantization == quantization
    build_model(w)


def test_folder_is_dense_unless_quantized(tmp_path: Path) -> None:
    save_model_folder(tmp_path, tiny_checkpoint("llama", intermediate_size=40), dtype=torch.float16)
    kinds = {"auto": Tensor, "bf16": Tensor, "int8": Int8, "int4": Int4}
    for quantization, kind in kinds.items():
        w = open_weights(tmp_path, torch.bfloat16, quantization)
        assert isinstance(unpack(w.load_matrix(UP_PROJ)), kind)
        narrow = unpack(w.load_matrix("model.layers.0.mlp.down_proj.weight"))  # 40 inputs are not whole groups
        assert isinstance(narrow, Tensor) and narrow.dtype == torch.bfloat16


def test_transposed_matrices_are_loaded_as_out_by_in() -> None:
    checkpoint, name = tiny_checkpoint("gpt2"), "transformer.h.0.mlp.c_fc.weight"
    expected = checkpoint.read(name).T
    assert matrices_equal(Weights(checkpoint, torch.float32).load_matrix(name, transposed=True), expected)
    int8, int4 = (
        Weights(checkpoint, torch.bfloat16, kind).load_matrix(name, transposed=True) for kind in ("int8", "int4")
    )
    assert matrices_equal(int8, quantize_int8(expected))
    assert matrices_equal(int4, quantize_int4(expected))


def test_float32_means_float32_everywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0")
    w = open_weights(path, torch.float32)
    matrix = unpack(w.load_matrix(UP_PROJ))
    assert isinstance(matrix, Tensor) and matrix.dtype == torch.float32
    assert matrices_equal(matrix, w.checkpoint.read(UP_PROJ))
    for weights in ("bf16", "int8", "int4"):
        with pytest.raises(ValueError, match="float32 everywhere"):
            open_weights(path, torch.float32, weights)
        with pytest.raises(ValueError, match="float32 everywhere"):
            Config("matrix", dtype="float32", weights=weights)
        assert Config("matrix", weights=weights).weights == weights
    for refuse in (lambda: open_weights(path, torch.bfloat16, "int3"), lambda: Config("matrix", weights="int3")):
        with pytest.raises(ValueError, match="weights 'int3' is not supported: choose auto, bf16, int8 or int4"):
            refuse()


def test_weights_too_large_for_a_scale_are_refused() -> None:
    class HugeCheckpoint(TinyCheckpoint):
        def read(self, name: str) -> Tensor:
            return super().read(name) * 1e9

    checkpoint = tiny_checkpoint("llama")
    w = Weights(HugeCheckpoint(checkpoint.config, checkpoint.shapes, 0), torch.bfloat16, "int8")
    with pytest.raises(ValueError, match=f"{UP_PROJ}' cannot be quantized: the scale of a group of weights"):
        w.load_matrix(UP_PROJ)
    with pytest.raises(ValueError, match=r"no tensor 'model\.x'"):
        w.scope("model.").load_matrix("x")
