"""GGUF files of models whose layers differ: quirks of converters are read, and what cannot be computed is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retain.formats.gguf import GGUFCheckpoint
from retain.models import load_family
from retain.models.families.gemma4_text import get_ropes
from retain.models.family_config import FamilyConfig
from tests.helpers.gguf_files import tiny_for_gguf, write_gguf

# Gemma 4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"attention.sliding_window_pattern": [False, False, False, True]}, "last layer slides"),
        ({"attention.sliding_window_pattern": [True, False]}, "for 2 layers, there are 4"),
        ({"attention.sliding_window_pattern": [1, 0, 1, 0]}, "not a list of values of type bool"),
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
