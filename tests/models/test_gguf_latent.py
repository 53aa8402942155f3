"""GGUF files of latent attention and DeepSeek's experts: layouts of older converters are read, others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants

from retain.formats.gguf import GGUFCheckpoint
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.gguf_files import GGUF_ARCHS, tiny_for_gguf, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint

OLD_SIZES = {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.head_count_kv": 4}


def write_old(path: Path, checkpoint: TinyCheckpoint, **extra: Any) -> GGUFCheckpoint:
    """Write a file whose heads are not absorbed, as before llama.cpp pull 12801."""
    c = checkpoint.config
    extra |= {
        **OLD_SIZES,
        "attention.key_length": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length": c["v_head_dim"],
    }
    tensors: dict[str, Any] = {}
    for i in range(c["num_hidden_layers"]):
        tensors |= {f"blk.{i}.attn_{n}_b.weight": None for n in ("k", "v")}
        own = checkpoint.read(f"model.layers.{i}.self_attn.kv_b_proj.weight").numpy()
        tensors[f"blk.{i}.attn_kv_b.weight"] = own
    metadata = {f"deepseek2.{key}": value for key, value in extra.items()}
    return GGUFCheckpoint(write_gguf(path, checkpoint, extra=metadata, tensors=tensors))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_old_files_have_one_matrix_of_the_latent(tmp_path: Path, model_type: str) -> None:
    checkpoint = tiny_for_gguf(model_type)
    ours = write_old(tmp_path / "m.gguf", checkpoint)
    assert ours.names() == checkpoint.names() and ours.config["model_type"] == model_type
    text = random_tokens(20)
    both = (build_model(Weights(c, torch.float32)) for c in (ours, checkpoint))
    of_file, expected = (run_decoder(model, [text], [[20]])[0] for model in both)
    torch.testing.assert_close(of_file, expected, atol=1e-4, rtol=1e-4)


def test_matrices_of_heads_keep_their_bits(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("deepseek_v3"), "Q8_0")
    ours = GGUFCheckpoint(path)
    stored = {t.name: t for t in GGUFReader(path).tensors}
    for part, shape in (("k", (128, 32)), ("v", (64, 32))):
        weight = ours.read_stored(f"model.layers.1.self_attn.{part}_b_proj.weight")
        tensor = stored[f"blk.1.attn_{part}_b.weight"]
        assert weight is not None and weight.shape == shape and tensor.tensor_type == GGMLQuantizationType.Q8_0
        expected = quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        assert np.array_equal(weight.unpack().dequantize(), expected)


def read_config(tmp_path: Path, model_type: str, extra: dict[str, Any]) -> dict[str, Any]:
    metadata = {f"{GGUF_ARCHS[model_type]}.{key}": value for key, value in extra.items()}
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=metadata)).config


def test_a_bias_of_experts_implies_a_sigmoid(tmp_path: Path) -> None:
    """The first files of GLM-4.7-Flash lack the key."""
    silent = {"expert_gating_func": None}
    assert read_config(tmp_path, "glm4_moe_lite", silent)["model_type"] == "deepseek_v3"
    assert read_config(tmp_path, "deepseek_v2", silent)["model_type"] == "deepseek_v2"
    assert read_config(tmp_path, "deepseek_v2", {"expert_gating_func": 1})["model_type"] == "deepseek_v2"


def test_missing_groups_are_one(tmp_path: Path) -> None:
    config = read_config(tmp_path, "deepseek_v3", {"expert_group_count": None, "expert_group_used_count": None})
    assert (config["n_group"], config["topk_group"]) == (1, 1)


def test_the_gain_of_yarn_is_a_tenth_in_files(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 64}
    for written, value in ((0.1, 1.0), (0.0707, 0.707)):
        scaling = read_config(tmp_path, "deepseek_v3", yarn | {"rope.scaling.yarn_log_multiplier": written})
        assert [scaling["rope_scaling"][key] for key in ("mscale", "mscale_all_dim")] == [value, value]
    assert "mscale" not in read_config(tmp_path, "deepseek_v3", yarn)["rope_scaling"]


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("deepseek_v3", {"expert_gating_func": 3}, "only 1 and 2 are supported"),
        ("deepseek_v3", {"expert_count": None}, "expert_count is missing or 0"),
        ("deepseek_v3", {"expert_count": 2**20}, "expert_count is 1048576"),
        ("deepseek_v3", {"expert_shared_count": 0}, "expert_shared_count is missing or 0"),
        ("deepseek_v3", {"attention.kv_lora_rank": None}, "kv_lora_rank is missing or 0"),
        ("deepseek_v3", {"attention.kv_lora_rank": 2**30}, "kv_lora_rank is 1073741824"),
        ("deepseek_v3", {"attention.key_length_mla": 8}, "leave none without rotation"),
        ("deepseek_v3", {"attention.temperature_scale": 0.5}, "queries that grow"),
        ("deepseek_v2", {"expert_weights_norm": True}, "softmax whose weights are normalized"),
        ("deepseek_v2", {"rope.dimension_count": None}, "rope.dimension_count is missing or 0"),
        ("glm4_moe", {"rope.dimension_sections": [4, 4, 0, 0]}, "M-RoPE"),
        ("glm4_moe", {"expert_gating_func": 1}, "only 2, sigmoid, is supported"),
        ("glm4_moe", {"rope.dimension_count": 32}, "differ in size"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, model_type: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        read_config(tmp_path, model_type, extra)
    assert "\n" not in str(e.value)


def test_the_layer_of_glm_4_5_that_predicts_further_tokens_has_names(tmp_path: Path) -> None:
    checkpoint = tiny_for_gguf("glm4_moe")
    expected = GGUFCheckpoint(write_gguf(tmp_path / "without.gguf", checkpoint)).names()
    names = ("nextn.eh_proj", "nextn.embed_tokens", "nextn.shared_head_head", "attn_norm", "attn_q")
    tensors = {f"blk.3.{name}.weight": np.ones((2, 32), np.float32) for name in names}
    tensors["blk.3.ffn_gate_exps.weight"] = np.ones((8, 2, 32), np.float32)
    extra = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra, tensors=tensors))
    own = {name.removeprefix("model.layers.3.") for name in ours.names() - expected}
    ends = ("eh_proj", "embed_tokens", "shared_head.head", "input_layernorm", "self_attn.q_proj")
    experts = (f"mlp.experts.{e}.gate_proj" for e in range(8))
    assert own == {f"{end}.weight" for end in (*ends, *experts)} and ours.config["num_hidden_layers"] == 3


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 32, 32), "not that of 4 experts"),
        ((4, 16, 32), "has width 64, but 128"),
        ((128, 32), "not that of 4 experts"),
    ],
)
def test_stacks_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...], message: str) -> None:
    tensors = {"blk.1.attn_k_b.weight": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=message) as e:
        ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("deepseek_v3"), tensors=tensors))
        run_decoder(build_model(Weights(ours, torch.float32)), [random_tokens(4)], [[4]])
    assert "\n" not in str(e.value)
