"""Random weights have the tensors that their family reads, no more and no less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from retain.formats.random_weights import CONFIGS, RandomCheckpoint
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder

SMALL = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"num_local_experts": 8, "sliding_window": 4},
    **{"d_model": 64, "n_heads": 4, "n_layers": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_reads_every_tensor_and_misses_none(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    small = {**config, **{key: value for key, value in SMALL.items() if key in config}}
    (tmp_path / "config.json").write_text(json.dumps(small))
    model = build_model(Weights(RandomCheckpoint(tmp_path), torch.float32))
    (logits,) = run_decoder(model, [random_tokens(5)], [[5]])
    assert logits.isfinite().all()
