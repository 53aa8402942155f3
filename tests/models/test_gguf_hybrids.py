"""GGUF files of models whose layers differ: quirks of converters are read, and what cannot be computed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retain.formats.gguf import GGUFCheckpoint
from retain.formats.gguf.architecture import is_layer
from retain.models import load_family
from retain.models.families.gemma4_text import get_ropes
from retain.models.family_config import FamilyConfig
from retain.models.weights import Weights
from tests.helpers import counted_work
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.gguf_files import GGUF_ARCHS, tiny_for_gguf, write_gguf


@pytest.mark.parametrize(
    "model_type", ["gemma4_text", "qwen3_5_text", "lfm2", "olmo3", "granitemoehybrid", "nemotron_h"]
)
def test_a_number_of_layers_is_checked_before_lists_are_made(tmp_path: Path, model_type: str) -> None:
    arch = GGUF_ARCHS[model_type]
    extra = {f"{arch}.block_count": 2**32 - 1, f"{arch}.attention.head_count_kv": 2, f"{arch}.feed_forward_length": 32}
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=extra)
    with (
        counted_work.at_most(100_000),
        pytest.raises(ValueError, match="block_count is 4294967295, but there are only"),
    ):
        GGUFCheckpoint(path)


@pytest.mark.parametrize("text", ["0", "7", "8", "12", "007", "-1", "+3", " 3", "3_0", "\u0663", "", "1" * 5000])
def test_numbers_of_layers_are_read_as_they_are_written(text: str) -> None:
    assert is_layer(text, 8) == (text in map(str, range(8)))
    assert is_layer(text, 13, 8) == (text in map(str, range(8, 13)))


# Gemma 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention.sliding_window_pattern": [False, False, False, True]}, "last layer slides"),
        ({"attention.sliding_window_pattern": [True, False]}, "for 2 layers, there are 4"),
        ({"attention.head_count_kv": ["2", "2", "2", "2"]}, "'list'|not a"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, "rope is scaled"),
        ({"rope.dimension_count_swa": 8}, "differ in size"),
        ({"attention.head_count_kv": [2, 1, 1, 1]}, "differs between layers of one type"),
        ({"feed_forward_length": [96, 192, 96, 96]}, "feed_forward_length differs"),
        ({"attention.shared_kv_layers": 3}, "num_kv_shared_layers leaves no layer"),
    ],
)
def test_other_layers_of_gemma4_are_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    metadata = {f"gemma4.{key}": value for key, value in extra.items()}
    with pytest.raises(ValueError, match=message):
        ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("gemma4_text"), extra=metadata))
        load_family(ours.config["model_type"]).spec_from_config(ours.config)


@pytest.mark.parametrize(
    "factors", [[1.0] * 4 + [2.0] * 12, [1e30] * 4 + [1.0] * 12, [1e30] * 16, [1.0] * 4 + [np.nan] * 12, [1.0] * 8]
)
def test_other_rope_factors_of_gemma4_are_refused(tmp_path: Path, factors: list[float]) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="rope_freqs"):
        tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
        GGUFCheckpoint(write_gguf(path, tiny_for_gguf("gemma4_text"), tensors=tensors))


@pytest.mark.parametrize("rotated", [15, 16, 1])
def test_rotated_pairs_of_gemma4_are_counted(tmp_path: Path, rotated: int) -> None:
    """The share is one that gives the same number of pairs; 15 / 44 of 44 would be 14."""
    checkpoint = tiny_for_gguf("gemma4_text", global_head_dim=88)
    tensors = {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (44 - rotated), np.float32)}
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, tensors=tensors))
    freqs = get_ropes(FamilyConfig(ours.config))["full_attention"].freqs
    assert int((freqs > 0).sum()) == rotated and len(freqs) == 44


def test_gemma4_files_may_have_gates_apart_from_up_projections(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
    checkpoint = tiny_for_gguf("gemma4_text", **experts)
    fused = GGUFCheckpoint(write_gguf(tmp_path / "fused.gguf", checkpoint))
    gates_and_ups = checkpoint.read("model.layers.0.experts.gate_up_proj").chunk(2, dim=1)
    tensors = {f"blk.0.ffn_{n}_exps.weight": x.numpy() for n, x in zip(("gate", "up"), gates_and_ups, strict=True)}
    tensors["blk.0.ffn_gate_up_exps.weight"] = None
    apart = GGUFCheckpoint(write_gguf(tmp_path / "apart.gguf", checkpoint, tensors=tensors))
    assert fused.names() == apart.names() and fused.config == apart.config
    assert all(torch.equal(fused.read(name), apart.read(name)) for name in fused.names())
    both = {"blk.0.ffn_gate_exps.weight": np.zeros((6, 32, 64), np.float32)}
    with pytest.raises(ValueError, match="is there twice"):
        GGUFCheckpoint(write_gguf(tmp_path / "both.gguf", checkpoint, tensors=both))


# Qwen3-Next and Qwen3.5


def assert_equal(ours: GGUFCheckpoint, expected: GGUFCheckpoint) -> None:
    assert ours.names() == expected.names()
    assert all(torch.equal(ours.read(name), expected.read(name)) for name in expected.names())
    family = load_family(ours.config["model_type"])
    assert family.spec_from_config(ours.config) == family.spec_from_config(expected.config)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_layer_that_predicts_further_tokens_has_names(tmp_path: Path, model_type: str) -> None:
    """A second one is read past, and so is what is not known of the first."""
    checkpoint, arch = tiny_for_gguf(model_type), GGUF_ARCHS[model_type]
    expected = GGUFCheckpoint(write_gguf(tmp_path / "without.gguf", checkpoint)).names()
    ends = {
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.shared_head_norm": "shared_head.norm",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "nextn.later": None,
    }
    tensors = {f"blk.{i}.{name}.weight": np.ones((2, 32), np.float32) for name in ends for i in (4, 5)}
    extra = {f"{arch}.block_count": 6, f"{arch}.nextn_predict_layers": 2}
    found = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra, tensors=tensors))
    assert found.names() - expected == {f"model.layers.4.{end}.weight" for end in ends.values() if end}
    assert found.config["num_hidden_layers"] == 4 and expected < found.names()
    assert (found.read("model.layers.4.enorm.weight") == 0).all()  # norms multiply by 1 + w
    with pytest.raises(ValueError, match=r"blk\.4\.nextn\.eh_proj"):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, tensors=tensors))
    for n in (6, 7):
        extra[f"{arch}.nextn_predict_layers"] = n
        with pytest.raises(ValueError, match="nextn_predict_layers is"):
            GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra, tensors=tensors))


def test_old_files_of_qwen3_next_have_one_projection(tmp_path: Path) -> None:
    """Before the rows of q, k, v and z were sorted, they lay as in Hugging Face's."""
    checkpoint = tiny_for_gguf("qwen3_next")
    tensors: dict[str, Any] = {}
    for i in (0, 2):
        own = checkpoint.read(f"model.layers.{i}.linear_attn.in_proj_qkvz.weight").numpy()
        tensors |= {f"blk.{i}.ssm_in.weight": own, f"blk.{i}.attn_qkv.weight": None, f"blk.{i}.attn_gate.weight": None}
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, tensors=tensors))
    assert ours.names() == checkpoint.names()
    text = random_tokens(20)
    both = (build_model(Weights(c, torch.float32)) for c in (ours, checkpoint))
    of_file, expected = (run_decoder(model, [text], [[20]])[0] for model in both)
    torch.testing.assert_close(of_file, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_files_may_list_the_linear_layers(tmp_path: Path, model_type: str) -> None:
    is_linear, arch = [True, False, False, True], GGUF_ARCHS[model_type]
    types = ["linear_attention" if x else "full_attention" for x in is_linear]
    checkpoint = tiny_for_gguf(model_type, layer_types=types)
    extra = {
        f"{arch}.attention.recurrent_layers": is_linear,
        f"{arch}.attention.head_count_kv": [0 if x else 2 for x in is_linear],
    }
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra))
    assert ours.config["layer_types"] == types and ours.config["num_key_value_heads"] == 2
    build_model(Weights(ours, torch.float32))


def test_files_of_experts_may_lack_the_width_of_an_mlp(tmp_path: Path) -> None:
    checkpoint = tiny_for_gguf("qwen3_5_moe_text")
    expected = GGUFCheckpoint(write_gguf(tmp_path / "with.gguf", checkpoint))
    without = write_gguf(tmp_path / "m.gguf", checkpoint, extra={"qwen35moe.feed_forward_length": None})
    assert_equal(GGUFCheckpoint(without), expected)


@pytest.mark.parametrize("ggml_type", ["Q8_0", "Q4_0"])
def test_value_heads_that_split_groups_of_columns_become_dense(tmp_path: Path, ggml_type: str) -> None:
    """Heads of 24 numbers share groups of 32: their order is undone in float32."""
    checkpoint = tiny_for_gguf("qwen3_5_text", linear_value_head_dim=24)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, ggml_type))
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert ours.read_stored(name) is None and ours.read_stored(name.replace("out_proj", "in_proj_z")) is not None
    step = checkpoint.read(name).abs().max() / (127 if ggml_type == "Q8_0" else 7)
    assert torch.allclose(ours.read(name), checkpoint.read(name), rtol=0, atol=step)


@pytest.mark.parametrize(
    ("extra", "tensors", "message"),
    [
        ({"ssm.inner_size": 100}, {}, "no multiple of 6 heads"),
        ({"ssm.group_count": 4}, {}, "6 value heads are no multiple of 4 key heads"),
        ({"ssm.time_step_rank": None}, {}, "ssm.time_step_rank is missing or 0"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, {}, "differs between layers"),
        ({}, {"blk.0.ssm_a": np.array([-1, 0.5, -1, -1, -1, -1], np.float32)}, "ssm_a has numbers above 0"),
        ({}, {"blk.0.ssm_a": np.array([-1, np.nan, -1, -1, -1, -1], np.float32)}, "ssm_a has numbers above 0"),
        ({}, {"blk.0.ssm_conv1d.weight": np.ones((10, 4), np.float32)}, "damaged"),
        ({}, {"blk.0.attn_qkv.bias": np.ones(10, np.float32)}, "attn_qkv.bias"),
    ],
)
def test_damaged_files_of_qwen35_are_refused(
    tmp_path: Path, extra: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    metadata = {f"qwen35.{key}": value for key, value in extra.items()}
    checkpoint = tiny_for_gguf("qwen3_5_text", linear_num_value_heads=6)
    with pytest.raises(ValueError, match=message) as e:
        ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=metadata, tensors=tensors))
        for name in ours.names():
            ours.read(name)
    assert "\n" not in str(e.value)


# LFM2


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0]}, "differs between layers"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv is missing or 0"),
        ("lfm2", {"shortconv.l_cache": None}, "shortconv.l_cache is missing or 0"),
        ("lfm2", {"attention.sliding_window": 8}, "sliding window"),
        ("lfm2_moe", {"expert_gating_func": 1}, "only 2, sigmoid, is supported"),
        ("lfm2_moe", {"expert_count": 2**20}, "expert_count is 1048576"),
    ],
)
def test_other_layers_of_lfm2_are_refused(tmp_path: Path, model_type: str, extra: dict[str, Any], message: str) -> None:
    metadata = {f"{GGUF_ARCHS[model_type]}.{key}": value for key, value in extra.items()}
    with pytest.raises(ValueError, match=message):
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=metadata))
