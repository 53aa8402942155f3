"""Quirks of GGUF files of the dense families of 2024 and 2025: what is read, what is the default, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain import models
from retain.formats.gguf import GGUFCheckpoint
from retain.models.decoder import ModelSpec
from tests.helpers.gguf_files import GGUF_ARCHS, tiny_for_gguf, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint


def read_config(tmp_path: Path, source: str | TinyCheckpoint, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a file with `extra` metadata, whose keys lack the architecture."""
    checkpoint = tiny_for_gguf(source) if isinstance(source, str) else source
    arch = GGUF_ARCHS[checkpoint.config["model_type"]]
    metadata = {f"{arch}.{key}": value for key, value in extra.items()}
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=metadata)).config


def make_spec(config: dict[str, Any]) -> ModelSpec:
    return models.load_family(config["model_type"]).spec_from_config(config)


def test_a_window_makes_olmo2_olmo3(tmp_path: Path) -> None:
    without = read_config(tmp_path, "olmo3", {"attention.sliding_window": None})
    assert without["model_type"] == "olmo2" and set(make_spec(without).kv_cache.windows) == {None}
    silent = read_config(tmp_path, "olmo3", {"attention.sliding_window_pattern": None})
    assert make_spec(silent).kv_cache.windows == (8, 8, 8, None)
    every = read_config(tmp_path, "olmo3", {"attention.sliding_window_pattern": 2})
    assert make_spec(every).kv_cache.windows == (8, None, 8, None)


def test_olmo3_scales_full_layers_alone(tmp_path: Path) -> None:
    rope = read_config(tmp_path, "olmo3", {"rope.scaling.yarn_attn_factor": 1.5})["rope_parameters"]
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert rope["full_attention"]["rope_type"] == "yarn" and rope["full_attention"]["attention_factor"] == 1.5


@pytest.mark.parametrize(("layers", "context", "window"), [(32, 4096, 2047), (32, 8192, None), (24, 4096, None)])
def test_first_files_of_phi3_have_the_window_of_their_model(
    tmp_path: Path, layers: int, context: int, window: int | None
) -> None:
    """llama.cpp pull 8931."""
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 8}
    checkpoint = tiny_checkpoint("phi3", num_hidden_layers=layers, max_position_embeddings=context, **tiny)
    assert read_config(tmp_path, checkpoint, {"attention.sliding_window": None})["sliding_window"] == window
    assert read_config(tmp_path, checkpoint, {"attention.sliding_window": 0})["sliding_window"] is None
    assert read_config(tmp_path, checkpoint, {"attention.sliding_window": 9})["sliding_window"] == 9


def test_long_contexts_of_phi3_are_read(tmp_path: Path) -> None:
    lists = {"long_factor": [2.0 + i for i in range(8)], "short_factor": [1.25] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **lists}
    scaling = read_config(tmp_path, tiny_checkpoint("phi3", rope_scaling=rope), {})["rope_scaling"]
    assert {key: scaling[key] for key in rope} == rope
    assert scaling["attention_factor"] == pytest.approx((1 + np.log(512 / 64) / np.log(64)) ** 0.5)
    with pytest.raises(ValueError, match=r"'rope_factors_long.weight' has the shape \(9,\)"):
        read_config(tmp_path, tiny_checkpoint("phi3", rope_scaling={**rope, "long_factor": [1.0] * 9}), {})


def test_missing_multipliers_of_granite_are_those_of_llama(tmp_path: Path) -> None:
    scales = ("attention.scale", "embedding_scale", "residual_scale")
    for value in (None, 0.0):
        config = read_config(tmp_path, "granite", {**dict.fromkeys(scales, value), "logit_scale": 0.0})
        assert config["attention_multiplier"] == 16**-0.5
        assert [config[k] for k in ("embedding_multiplier", "residual_multiplier", "logits_scaling")] == [1.0] * 3


def test_dense_models_of_granite_4_have_lists_and_no_experts(tmp_path: Path) -> None:
    """The converter of hybrids writes a count for each layer, and experts of 0."""
    extra = {"attention.head_count_kv": [2, 2, 2], "expert_count": 0, "rope.scaling.finetuned": True}
    assert read_config(tmp_path, "granite", extra)["num_key_value_heads"] == 2


def test_mistral3_without_growing_queries_is_mistral(tmp_path: Path) -> None:
    plain = {"attention.temperature_scale": None, "rope.scaling.type": "none"}
    config = read_config(tmp_path, "ministral3", plain)
    assert (config["model_type"], config["sliding_window"], config["rope_scaling"]) == ("mistral", None, None)
    assert set(make_spec(config).kv_cache.windows) == {None}


def test_scales_of_yarn_are_read(tmp_path: Path) -> None:
    extra = {"rope.scaling.yarn_log_multiplier": 0.5, "attention.temperature_scale": 0.25}
    scaling = read_config(tmp_path, "ministral3", extra)["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"], scaling["llama_4_scaling_beta"]) == (1.0, 0.5, 0.25)
    assert (
        "mscale" not in read_config(tmp_path, "ministral3", {"rope.scaling.yarn_log_multiplier": 0.0})["rope_scaling"]
    )


def test_cohere2_may_list_its_sliding_layers(tmp_path: Path) -> None:
    extra = {"attention.sliding_window_pattern": [False, True, True, False]}
    assert make_spec(read_config(tmp_path, "cohere2", extra)).kv_cache.windows == (None, 8, 8, None)


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "without rope"),
        ("granite", {"rope.dimension_count": 8}, "a part is rotated .* granite"),
        ("glm4", {"rope.dimension_sections": [4, 4, 0, 0]}, "M-RoPE"),
        ("glm4", {"rope.dimension_count": 32}, "differ in size"),
        ("cohere2", {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8}, "hidden size"),
        ("cohere2", {"attention.sliding_window": None}, "sliding_window is missing"),
        ("cohere2", {"attention.sliding_window_pattern": [True]}, "for 1 layers, there are 4"),
        ("olmo3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern is missing or 0"),
        ("olmo3", {"attention.sliding_window": "x"}, "'x'"),
        ("ministral3", {"rope.scaling.type": None}, "without yarn"),
        ("ministral3", {"rope.scaling.yarn_ext_factor": 0.5}, "ext_factor"),
        ("seed_oss", {"attention.value_length": 4}, "differ in size"),
        ("muse_glimmer_text", {"rope.freq_base_swa": 5.0}, "another base in sliding layers"),
        ("muse_glimmer_text", {"rope.scale_linear": 2.0}, "scaled rope"),
        ("muse_glimmer_text", {"logit_scale": None}, "muse-glimmer.logit_scale is missing"),
        ("muse_glimmer_text", {"attention.sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_a_family_cannot_do_is_refused(
    tmp_path: Path, model_type: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as e:
        read_config(tmp_path, model_type, extra)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("model_type", "name", "message"),
    [
        ("llama", "rope_factors_long.weight", "not known in a llama model"),
        ("phi3", "rope_factors_short.weight", "not known in a phi3 model"),
        ("phi3", "blk.0.attn_qkv.bias", "not known in a phi3 model"),
        ("glm4", "blk.2.nextn.eh_proj.weight", "not known in a glm4 model"),
        ("cohere2", "blk.0.attn_q.bias", "not known in a cohere2 model"),
        ("seed_oss", "blk.0.ffn_norm.weight", "not known in a seed_oss model"),
        ("ministral3", "blk.0.attn_q.bias", "not known in a ministral3 model"),
    ],
)
def test_tensors_that_a_family_does_not_have_are_refused(
    tmp_path: Path, model_type: str, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as e:
        write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), tensors={name: np.ones(8, np.float32)})
        GGUFCheckpoint(tmp_path / "m.gguf")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("blk.0.attn_q_norm.weight", None, "a layer without a tensor 'attn_q_norm.weight'"),
        ("blk.0.attn_q_norm.weight", [3.875] * 15 + [2.0], "norms of queries other than one number above 0"),
        ("blk.1.attn_q_norm.weight", [2.0] * 16, "norms of queries other than one number above 0"),
        ("blk.0.attn_q_norm.weight", [np.inf] * 16, "norms of queries other than one number above 0"),
        ("blk.0.attn_q_norm.weight", [], r"has the shape \(0,\)"),
        ("blk.0.attn_k_norm.weight", [1.0] * 15 + [2.0], "norms of keys other than 1"),
        ("blk.9.attn_k_norm.weight", [1.0] * 16, "not known in a muse_glimmer_text model"),
        ("blk.0.attn_q.bias", [1.0] * 64, "not known in a muse_glimmer_text model"),
    ],
)
def test_norms_of_muse_glimmer_are_one_factor(
    tmp_path: Path, name: str, values: list[float] | None, message: str
) -> None:
    tensors = {name: None if values is None else np.array(values, np.float32)}
    with pytest.raises(ValueError, match=message) as e:
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("muse_glimmer_text"), tensors=tensors))
    assert "\n" not in str(e.value)
