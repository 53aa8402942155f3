"""Every tensor of a file is used, known to mean nothing, left out as in transformers with a warning, or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retain import models
from retain.models.weights import Weights, open_weights
from tests.helpers.decoder_runner import build_model
from tests.helpers.family_variants import Changes
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.test_config_keys import assert_equals_transformers, write_folder

F32 = torch.float32
LAYER = "model.layers.1."
TIED = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "gptj", "gpt_neox", "mpt", "opt"]


def random_tensors(*names: str, shape: tuple[int, ...] = (64,)) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}


def biases(prefix: str, **sizes: int) -> dict[str, Tensor]:
    """Return random biases of modules, by the names of the modules after the prefix."""
    return {f"{prefix}{name}.bias": torch.randn(size) for name, size in sizes.items()}


def own_biases(family: str, part: str) -> dict[str, Tensor]:
    """Return the biases of a tiny model whose names have a part."""
    checkpoint = tiny_checkpoint(family)
    return {n: checkpoint.read(n) for n in checkpoint.names() if n.endswith(".bias") and part in n}


@pytest.mark.slow
@pytest.mark.parametrize("family", TIED)
def test_a_head_that_differs_from_a_tied_embedding_is_used(tmp_path: Path, family: str) -> None:
    head = random_tensors("lm_head.weight", shape=(128, 64))
    assert_equals_transformers(write_folder(tmp_path, family, {"tie_word_embeddings": True}, **head))


@pytest.mark.parametrize("family", TIED)
def test_a_head_equal_to_a_tied_embedding_is_that_embedding(tmp_path: Path, family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    name = next(n for n in checkpoint.names() if re.search(r"(embed_tokens|wte|embed_in)\.weight$", n))
    head = {"lm_head.weight": checkpoint.read(name)}
    model = build_model(open_weights(write_folder(tmp_path, family, {"tie_word_embeddings": True}, **head), F32))
    assert model.decoder.lm_head.weight is model.decoder.embedding.table  # type: ignore[attr-defined]


LLAMA_BIASES = {
    **biases(f"{LAYER}self_attn.", q_proj=64, k_proj=32, v_proj=32, o_proj=64),
    **biases(f"{LAYER}mlp.", gate_proj=96, up_proj=96, down_proj=64),
    **biases(LAYER, input_layernorm=64),
    **biases("", lm_head=128),
}
DENIED: list[tuple[str, Changes, dict[str, Tensor]]] = [
    ("llama", {"attention_bias": False, "mlp_bias": False}, LLAMA_BIASES),
    ("mistral", {"attention_bias": True, "mlp_bias": True}, LLAMA_BIASES),
    ("qwen2", {"attention_bias": True}, {n: b for n, b in LLAMA_BIASES.items() if "o_proj" in n or "mlp" in n}),
    ("qwen3", {"mlp_bias": True}, {n: b for n, b in LLAMA_BIASES.items() if "k_proj" in n or "mlp" in n}),
    ("gemma3_text", {"attention_bias": False}, biases(f"{LAYER}self_attn.", q_proj=64, k_proj=16)),
    ("gptj", {}, biases("transformer.h.1.attn.", q_proj=64, out_proj=64)),
    ("gpt_neox", {"attention_bias": False}, own_biases("gpt_neox", ".attention.")),
    ("mpt", {}, biases("transformer.blocks.1.", **{"norm_1": 64, "attn.Wqkv": 192, "ffn.down_proj": 64})),
    ("opt", {"enable_bias": False}, own_biases("opt", "_proj.") | own_biases("opt", ".fc")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "tensors"), DENIED, ids=[d[0] for d in DENIED])
def test_biases_that_a_config_denies_are_left_out_with_a_warning(
    tmp_path: Path, family: str, changes: Changes, tensors: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    assert_equals_transformers(write_folder(tmp_path, family, changes, **tensors))
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "retain.models"]
    assert repr(min(tensors)) in warning and f"a {family} model" in warning
    assert len(tensors) == 1 or f"and {len(tensors) - 1} more" in warning


MEANINGLESS = {
    "llama": [f"{LAYER}self_attn.rotary_emb.inv_freq"],
    "mistral": [f"{LAYER}self_attn.rotary_emb.inv_freq"],
    "gpt2": ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"],
    "gptj": ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"],
    "qwen3_next": ["mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    "deepseek_v3": ["model.layers.3.eh_proj.weight", "model.layers.3.self_attn.q_a_proj.weight"],
    "glm4_moe": ["model.layers.3.shared_head.norm.weight"],
    "glm4_moe_lite": ["model.layers.3.embed_tokens.weight", "model.layers.3.mlp.gate.weight"],
    "nemotron_h": ["mtp.layers.0.norm.weight", "mtp.layers.0.mixer.q_proj.weight"],
    "qwen3_5_text": ["mtp.fc.weight", "model.visual.merger.norm.weight"],
    "gpt_neox": [f"gpt_neox.layers.1.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq")],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", MEANINGLESS)
def test_tensors_that_mean_nothing_are_ignored(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_equals_transformers(write_folder(tmp_path, family, {}, **random_tensors(*MEANINGLESS[family])))
    assert not [r for r in caplog.records if r.name == "retain.models"]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{LAYER}self_attn.q_norm.weight"),
        ("mistral", f"{LAYER}self_attn.sinks"),
        ("qwen2", f"{LAYER}self_attn.k_norm.weight"),
        ("qwen3", "model.layers.3.input_layernorm.weight"),
        ("gemma3_text", f"{LAYER}self_attn.rotary_emb.inv_frequencies"),
        ("llama", f"{LAYER}self_attn.bias"),
        ("llama", f"{LAYER}self_attn.extra_proj.bias"),
        ("gpt2", "transformer.h.1.ln_cross_attn.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.lora_A.weight"),
        ("gpt2", "lm_head.bias"),
        ("opt", "model.decoder.project_in.weight"),
        ("mpt", "transformer.wpe.weight"),
        ("gpt_neox", "score.weight"),
        ("gptj", "transformer.h.1.ln_2.weight"),
    ],
)
def test_other_tensors_are_refused_by_name(family: str, name: str) -> None:
    checkpoint = tiny_checkpoint(family)
    checkpoint.shapes[name] = (64,)
    with pytest.raises(ValueError, match=re.escape(f"the model file has {name!r} that a {family} model with")):
        build_model(Weights(checkpoint, F32))


@pytest.mark.parametrize("family", models.list_families())
def test_every_tensor_is_needed(family: str) -> None:
    """The embedding of a tied head, biases and norms too."""
    names = [n for n in tiny_checkpoint(family).names() if ".0." not in n and ".2." not in n]
    for name in names:
        checkpoint = tiny_checkpoint(family)
        del checkpoint.shapes[name]
        with pytest.raises(ValueError, match=r"the model file has no tensor"):
            build_model(Weights(checkpoint, F32))


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("llama", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("llama", {"mlp_bias": True}, "model.layers.0.mlp.gate_proj.bias"),
        ("qwen3", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("qwen3", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("gemma3_text", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("gpt2", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("opt", {"word_embed_proj_dim": 32}, "model.decoder.project_in.weight"),
    ],
)
def test_tensors_that_a_config_promises_are_missed_by_name(family: str, changes: Changes, name: str) -> None:
    checkpoint = tiny_checkpoint(family)
    checkpoint.config |= changes
    with pytest.raises(ValueError, match=re.escape(f"no tensor {name!r}")):
        build_model(Weights(checkpoint, F32))


@pytest.mark.parametrize("family", models.list_families())
def test_tensors_of_another_shape_are_refused(family: str) -> None:
    """One of each name, of half the width and as a vector. Embeddings may have more rows than tokens."""
    checkpoint = tiny_checkpoint(family)
    one_of_each = {re.sub(r"\d+", "", name): name for name in sorted(checkpoint.names())}
    for name in one_of_each.values():
        *rows, width = checkpoint.shapes[name]
        for shape in {(*rows, width // 2 or 2), (width // 2,), (width,)} - {(*rows, width)}:
            changed = tiny_checkpoint(family)
            changed.shapes = {**checkpoint.shapes, name: shape}
            changed.read = lambda n, shapes=changed.shapes: torch.ones(shapes[n])  # type: ignore[method-assign]
            try:
                build_model(Weights(changed, F32))
            except ValueError:
                continue
            pytest.fail(f"{name} may be {shape}")
