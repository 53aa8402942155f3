"""LongRoPE: the engine's context chooses the factors, and on either side of the bound transformers chooses the same."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from retain import LLM, SamplingParams
from retain.models.rope import get_longrope
from retain.models.weights import open_weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.folders import save_model_folder, save_tiny_smollm2
from tests.helpers.tiny_models import tiny_checkpoint

ORIGINAL = 24  # tokens
SHORT = [1.0 + i / 8 for i in range(8)]
LONG = [2.0 + i for i in range(8)]
SCALING: dict[str, Any] = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
CONTEXT = {"max_position_embeddings": 128, "original_max_position_embeddings": ORIGINAL, "sliding_window": None}
SHARE = {"partial_rotary_factor": 0.75}
VARIANTS: list[dict[str, Any]] = [
    {"rope_scaling": SCALING},
    {"rope_scaling": {**SCALING, "type": "su", "original_max_position_embeddings": ORIGINAL}},
    {"rope_scaling": {**SCALING, "factor": 3.0}},
    {"rope_scaling": {**SCALING, "attention_factor": 1.7}},
    {"rope_scaling": {**SCALING, "short_factor": SHORT[:6], "long_factor": LONG[:6]}, **SHARE},
]


def write_folder(folder: Path, changes: dict[str, Any]) -> Path:
    return save_model_folder(folder, tiny_checkpoint("phi3", head_dim=16, **CONTEXT, **changes))


def compute_logits(folder: Path, num_tokens: int, context_limit: int | None) -> torch.Tensor:
    weights = open_weights(folder, torch.float32, context_limit=context_limit)
    (logits,) = run_decoder(build_model(weights), [random_tokens(num_tokens)], [[num_tokens - 9], [9]])
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize(
    ("num_tokens", "context_limit"), [(ORIGINAL, ORIGINAL), (ORIGINAL + 1, ORIGINAL + 1), (40, None), (16, 20)]
)
def test_both_sides_equal_transformers(
    tmp_path: Path, changes: dict[str, Any], num_tokens: int, context_limit: int | None
) -> None:
    """Texts that are longer than the original context where the engine's is, else shorter ones."""
    from transformers import AutoModelForCausalLM

    folder = write_folder(tmp_path, changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = model(random_tokens(num_tokens)[None], use_cache=False).logits[0]
    ours = compute_logits(folder, num_tokens, context_limit)
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=5e-5, rtol=0)


def test_the_engines_context_and_not_the_text_chooses(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"rope_scaling": SCALING})
    short, at_bound, long, whole = (compute_logits(folder, 12, n) for n in (12, ORIGINAL, ORIGINAL + 1, None))
    assert torch.equal(short, at_bound) and torch.equal(long, whole)
    assert not torch.allclose(short, long, atol=1e-3)


def test_an_engine_chooses_by_its_own_context(tmp_path: Path) -> None:
    """And what it stores is not for engines that chose otherwise."""
    save_tiny_smollm2(tmp_path)
    vocab_size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    scaled = {"rope_scaling": SCALING, "vocab_size": vocab_size}
    save_model_folder(tmp_path, tiny_checkpoint("phi3", head_dim=16, **CONTEXT, **scaled))
    prompt = random_tokens(10).tolist()
    tokens, stores = [], []
    for limit in (20, ORIGINAL, None):
        options = {"dtype": "float32", "kv_memory": "4MiB", "max_model_len": limit, "tier": "ram:capacity=1MiB"}
        with closing(LLM(str(tmp_path), **options)) as llm:
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True, temperature=0))
            tokens.append(output.token_ids)
            stores.append(llm.cache.prefix_cache.offloader.model_fingerprint)
    assert tokens[0] == tokens[1] != tokens[2]
    assert stores[0] == stores[1] != stores[2]


def test_given_factors_of_attention_are_of_each_kind_of_context() -> None:
    params = {**SCALING, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    params |= {"short_mscale": 1.25, "long_mscale": 1.5}
    assert [get_longrope(16, params, 128, n).attention_factor for n in (ORIGINAL, 128)] == [1.25, 1.5]


@pytest.mark.parametrize("factors", [None, 3, [], SHORT[:7], [0.0] * 8, ["x"] * 8, [float("inf")] * 8])
def test_wrong_lists_are_refused_in_a_line(factors: Any) -> None:
    params = {**SCALING, "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL, "long_factor": factors}
    get_longrope(16, params, 128, ORIGINAL)
    with pytest.raises(ValueError, match=r"long_factor is .*, not a list of 8 numbers above 0"):
        get_longrope(16, params, 128, 128)
