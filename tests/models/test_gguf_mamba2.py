"""GGUF files of models with Mamba-2: layouts are read, and what cannot be computed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retain.formats.gguf import GGUFCheckpoint
from retain.models import load_family
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model
from tests.helpers.gguf_files import GGUF_ARCHS, tiny_for_gguf, write_gguf
from tests.helpers.gguf_mamba2 import WITHOUT_EXPERTS


def open_file(tmp_path: Path, model_type: str, extra: dict[str, Any], **tensors: Any) -> GGUFCheckpoint:
    metadata = {f"{GGUF_ARCHS[model_type]}.{key}": value for key, value in extra.items()}
    named = {f"blk.0.{name.replace('__', '.')}": x for name, x in tensors.items()}
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=metadata, tensors=named))


def test_the_types_of_layers_follow_from_their_widths(tmp_path: Path) -> None:
    assert (
        open_file(tmp_path, "nemotron_h", {}).config["layer_types"] == tiny_for_gguf("nemotron_h").config["layer_types"]
    )
    dense = write_gguf(tmp_path / "dense.gguf", tiny_for_gguf("nemotron_h", layer_types=WITHOUT_EXPERTS))
    ours = GGUFCheckpoint(dense)
    assert ours.metadata["general.architecture"] == "nemotron_h" and ours.config["layer_types"] == WITHOUT_EXPERTS


def test_granite_4_rotates_only_where_the_file_says_so(tmp_path: Path) -> None:
    """llama.cpp takes `rope.scaling.finetuned` for that, and rotates where it is missing."""
    for value, expected in ((False, None), (True, "rope"), (None, "rope")):
        config = open_file(tmp_path, "granitemoehybrid", {"rope.scaling.finetuned": value}).config
        assert config["position_embedding_type"] == expected


def test_the_layer_of_nemotron_that_predicts_further_tokens_is_read_past(tmp_path: Path) -> None:
    """It has attention and experts."""
    checkpoint = tiny_for_gguf("nemotron_h")
    expected = GGUFCheckpoint(write_gguf(tmp_path / "without.gguf", checkpoint))
    names = ("nextn.eh_proj", "attn_norm", "attn_q", "ffn_norm", "ffn_up_exps")
    extra = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [0, 2, 0, 0, 2],
        "feed_forward_length": [0, 0, 32, 0, 32],
    }
    metadata = {f"nemotron_h_moe.{key}": value for key, value in extra.items()}
    tensors = {f"blk.4.{name}.weight": np.ones((2, 32), np.float32) for name in names}
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, extra=metadata, tensors=tensors))
    assert ours.names() == expected.names() and ours.config["layer_types"] == expected.config["layer_types"]
    build_model(Weights(ours, torch.float32))


@pytest.mark.parametrize(
    ("model_type", "extra", "message"),
    [
        ("granitemoehybrid", {"attention.head_count_kv": [0, 2, 1, 0]}, "differs between layers"),
        ("granitemoehybrid", {"attention.head_count_kv": [0, 2]}, "for 2 layers, there are 4"),
        ("granitemoehybrid", {"ssm.time_step_rank": None}, "ssm.time_step_rank is missing or 0"),
        ("granitemoehybrid", {"ssm.inner_size": 100}, "no multiple of 8 heads"),
        ("granitemoehybrid", {"ssm.inner_size": 96}, "no multiple of the hidden size 64"),
        ("granitemoehybrid", {"ssm.group_count": 3}, "cannot share 3 groups"),
        ("granitemoehybrid", {"ssm.state_size": 2**30}, "1073741824"),
        ("granitemoehybrid", {"expert_count": 2**20}, "expert_count is 1048576"),
        ("nemotron_h", {"feed_forward_length": [0, 0]}, "for 2 layers, there are 4"),
        ("nemotron_h", {"feed_forward_length": [0, 0, 0, 0]}, "feed_forward_length is missing or 0"),
        ("nemotron_h", {"moe_latent_size": 2**21}, "moe_latent_size is 2097152, not a whole number from 1 to 1048576"),
        ("nemotron_h", {"attention.value_length": 8}, "differ in size"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, model_type: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        load_family(model_type).spec_from_config(open_file(tmp_path, model_type, extra).config)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "nemotron_h"])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("ssm_norm.weight", (2, 32), r"have \[360, 64, 224\] rows"),
        ("ssm_conv1d.weight", (10, 4), r"a weight \[10, 1, 4\]"),
        ("ssm_in.weight", (64, 64), r"have \[64, 128, 224\] rows"),
        ("ssm_a", (3, 1), "has width 8, but 3"),
        ("ssm_d", (3, 1), "has width 8, but 3"),
        ("attn_norm.bias", (64,), "not known"),
        ("ssm_dt.weight", (8, 64), "not known"),
    ],
)
def test_tensors_of_another_shape_are_refused(
    tmp_path: Path, model_type: str, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as e:
        ours = open_file(tmp_path, model_type, {}, **{name: -np.ones(shape, np.float32)})
        build_model(Weights(ours, torch.float32))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"moe_latent_size": 16}, "do not fit its config: latent vectors have 32 numbers, but 16 in the config"),
        ({"moe_latent_size": None}, "do not fit its config: the input of experts has width 32, but 64 and 64"),
    ],
)
def test_latent_vectors_of_another_size_are_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    metadata = {f"nemotron_h_moe.{key}": value for key, value in extra.items()}
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("nemotron_h", moe_latent_size=32), extra=metadata)
    with pytest.raises(ValueError, match=message) as e:
        build_model(Weights(GGUFCheckpoint(path), torch.float32))
    assert "\n" not in str(e.value)
