"""What a file has quantised stays as it is, what is asked for otherwise is made, and damage is told."""

from __future__ import annotations

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
from retain.formats.gguf.dequantize import GGML_BLOCK_SIZES, dequantize_tensor, unpack_quantized
from retain.kernels.quantized import Int4, Int8, quantize_int4, quantize_int8
from retain.models.resolve import resolve_model
from retain.models.weights import Weights, open_weights
from tests.helpers.gguf_files import GGUF_ARCHS, write_gguf
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.test_gguf import FLOAT_TYPES, tiny_for_gguf
from tests.models.test_quantized_weights import expand_groups, matrices_equal
from tests.models.test_safetensors_folder import save_folder

EXACT_TYPES = {"Q4_0": Int4, "Q4_1": Int4, "Q5_0": Int8, "Q8_0": Int8}
BLOCK_TYPES = [k for k in FLOAT_TYPES if GGML_BLOCK_SIZES[k][0] > 1]
SCALE_OFFSETS = {  # where a block has its float16 scales, in bytes
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108]},
    **{"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0]},
}


def random_blocks(kind: GGMLQuantizationType, count: int, scales: bool = True) -> np.ndarray[Any, Any]:
    """Random bytes of `count` blocks, uint8 [n]; the scales are reasonable, unless these are random too."""
    draw, width = np.random.default_rng(int(kind)), GGML_BLOCK_SIZES[kind][1]
    raw = draw.integers(0, 256, (count, width), dtype=np.uint8)
    for at in SCALE_OFFSETS[kind.name] if scales else []:
        raw[:, at : at + 2] = draw.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(-1)


# Blocks


@pytest.mark.parametrize("kind", SCALE_OFFSETS)
def test_quanta_are_the_numbers(kind: str) -> None:
    """Exactly where groups are the same; to rounding of the scales in Q4_K; to half a step elsewhere."""
    ggml = GGMLQuantizationType[kind]
    shape = (6, 2 * GGML_BLOCK_SIZES[ggml][0])
    raw = random_blocks(ggml, 12)
    right, m = dequantize_tensor(raw, ggml, shape), unpack_quantized(raw, ggml, shape)
    assert m is not None and m.shape == shape and right.abs().max() > 1
    if kind in EXACT_TYPES:
        assert isinstance(m, EXACT_TYPES[kind]) and torch.equal(m.dequantize(), right)
    elif kind == "Q4_K":
        assert isinstance(m, Int4)
        steps = expand_groups(15 * m.scale.float().abs() + m.shift.float().abs())
        assert ((m.dequantize() - right).abs() <= steps * 2**-11 + 2**-20).all()
    else:
        assert matrices_equal(m, quantize_int8(right))
        assert ((m.dequantize() - right).abs() <= expand_groups(m.scale) * 0.57).all()


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda k: k.name)
def test_random_bytes_are_quanta_or_refused(kind: GGMLQuantizationType) -> None:
    size, width = GGML_BLOCK_SIZES[kind]
    raw = random_blocks(kind, 40, scales=False).reshape(-1, width)
    for block in raw:
        try:
            m = unpack_quantized(block, kind, (1, size))
        except ValueError as e:
            assert "\n" not in str(e)
        else:
            assert m is not None and m.dequantize().isfinite().all()


def test_what_is_not_quantised_has_no_quanta() -> None:
    for kind, dtype in ((0, np.float32), (1, np.float16), (30, np.uint16), (28, np.float64)):
        assert unpack_quantized(np.zeros(64, dtype).view(np.uint8), kind, (2, 32)) is None
    assert unpack_quantized(np.zeros(34, np.uint8), 8, (32,)) is None


@pytest.mark.parametrize(("kind", "scale"), [("Q4_0", np.inf), ("Q4_0", 60000), ("Q8_0", np.nan), ("Q5_0", -np.inf)])
def test_scales_that_are_not_finite_are_refused(kind: str, scale: float) -> None:
    ggml = GGMLQuantizationType[kind]
    raw = random_blocks(ggml, 3)
    at = GGML_BLOCK_SIZES[ggml][1]
    raw[at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="not finite in float16"):
        unpack_quantized(raw, ggml, (3, 32))


# Files


@pytest.mark.parametrize("kind", [*EXACT_TYPES, "Q5_1"])
@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_every_architecture_keeps_its_quanta(tmp_path: Path, model_type: str, kind: str) -> None:
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), kind))
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # stored [in, out] by Hugging Face
    for name in ours.names():
        right, transposed = ours.read(name), name.endswith(turned)
        m = ours.read_quantized(name, transposed)
        if right.ndim == 1:
            assert m is None
            continue
        assert isinstance(m, EXACT_TYPES.get(kind, Int8)), name
        right = right.T if transposed else right
        if kind in EXACT_TYPES:
            assert torch.equal(m.dequantize(), right), name
        else:
            assert ((m.dequantize() - right).abs() <= expand_groups(m.scale) * 0.57).all(), name


def test_the_other_way_round_is_quantised_anew(tmp_path: Path) -> None:
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("gpt2"), "Q8_0"))
    for name, transposed in (("transformer.h.0.mlp.c_fc.weight", False), ("transformer.wte.weight", True)):
        right = ours.read(name)
        assert matrices_equal(ours.read_quantized(name, transposed), quantize_int8(right.T if transposed else right))


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_the_embedded_models(model: str) -> None:
    source = GGUFCheckpoint(resolve_model(model))
    for name in source.names():
        if not name.endswith("proj.weight") or ".layers.1." not in name:
            continue
        right, m = source.read(name), source.read_quantized(name)
        assert m is not None
        error, scale = (m.dequantize() - right).abs(), expand_groups(m.scale).abs()
        assert error.max() < 0.003 and (error <= 0.51 * scale).all(), name
        if model == "smollm2":
            assert isinstance(m, Int4) and not error.any()
    assert isinstance(source.read_quantized("model.embed_tokens.weight"), Int8)


# Which kind


UP_PROJ, EMBEDDING, NORM = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize("stored", ["F32", "BF16", "Q8_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("weights", ["auto", "bf16", "int8", "int4"])
def test_the_kind_that_is_chosen(tmp_path: Path, stored: str, weights: str) -> None:
    w = open_weights(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), stored), torch.bfloat16, weights)
    in_file = {"Q8_0": Int8, "Q4_1": Int4, "Q5_1": Int8}.get(stored, Tensor)
    for name, embedding in ((UP_PROJ, False), (EMBEDDING, True)):
        asked = {"auto": in_file, "bf16": Tensor, "int8": Int8, "int4": Int8 if embedding else Int4}[weights]
        m, right = w.load_matrix(name, embedding), w.checkpoint.read(name).float()
        assert isinstance(m, asked)
        if asked is Tensor:
            assert matrices_equal(m, right.bfloat16())
        elif asked is in_file and stored != "Q5_1":
            assert torch.equal(m.dequantize(), right)
        else:
            assert matrices_equal(m, (quantize_int4 if asked is Int4 else quantize_int8)(right))
    assert w[NORM].dtype == w[UP_PROJ].dtype == torch.bfloat16
    assert w.scope("model.").quantization == weights
    assert isinstance(models.build(w).embedding(torch.tensor([3]), torch.tensor([0])), Tensor)


def test_a_folder_is_dense_until_it_is_quantised(tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_checkpoint("llama", intermediate_size=40), dtype=torch.float16)
    kinds = {"auto": Tensor, "bf16": Tensor, "int8": Int8, "int4": Int4}
    for weights, kind in kinds.items():
        w = open_weights(tmp_path, torch.bfloat16, weights)
        assert isinstance(w.load_matrix(UP_PROJ), kind)
        narrow = w.load_matrix("model.layers.0.mlp.down_proj.weight")  # 40 inputs are no whole groups
        assert isinstance(narrow, Tensor) and narrow.dtype == torch.bfloat16


def test_stored_the_other_way_round() -> None:
    source, name = tiny_checkpoint("gpt2"), "transformer.h.0.mlp.c_fc.weight"
    right = source.read(name).T
    assert matrices_equal(Weights(source, torch.float32).load_matrix(name, transposed=True), right)
    assert matrices_equal(
        Weights(source, torch.bfloat16, "int8").load_matrix(name, transposed=True), quantize_int8(right)
    )
    assert matrices_equal(
        Weights(source, torch.bfloat16, "int4").load_matrix(name, transposed=True), quantize_int4(right)
    )


def test_float32_means_float32_everywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0")
    w = open_weights(path, torch.float32)
    assert (
        matrices_equal(w.load_matrix(UP_PROJ), w.checkpoint.read(UP_PROJ))
        and w.load_matrix(UP_PROJ).dtype == torch.float32
    )
    for weights in ("bf16", "int8", "int4"):
        with pytest.raises(ValueError, match="float32 everywhere"):
            open_weights(path, torch.float32, weights)
        with pytest.raises(ValueError, match="float32 everywhere"):
            Config("m", dtype="float32", weights=weights)
        assert Config("m", weights=weights).weights == weights
    for refuse in (lambda: open_weights(path, torch.bfloat16, "int3"), lambda: Config("m", weights="int3")):
        with pytest.raises(ValueError, match="weights 'int3' is not supported: choose auto, bf16, int8 or int4"):
            refuse()


def test_a_number_that_no_scale_reaches_is_told(tmp_path: Path) -> None:
    class Huge(type(tiny_checkpoint("llama"))):  # type: ignore[misc]
        def read(self, name: str) -> Tensor:
            return super().read(name) * 1e9

    source = tiny_checkpoint("llama")
    w = Weights(Huge(source.config, source.shapes, 0), torch.bfloat16, "int8")
    with pytest.raises(ValueError, match=f"'{UP_PROJ}' cannot be quantised: the scale of a group of weights"):
        w.load_matrix(UP_PROJ)
    with pytest.raises(ValueError, match=r"no tensor 'model\.x'"):
        w.scope("model.").load_matrix("x")


def test_the_library_quantises_what_these_tests_read() -> None:
    """Should it learn to write more types, they belong into the files above."""
    for kind in ("Q4_K", "Q6_K"):
        with pytest.raises(NotImplementedError):
            gguf.quants.quantize(np.zeros((1, 256), np.float32), GGMLQuantizationType[kind])
