"""What a GGUF file does not say is what llama.cpp takes then: never a default of a config class of transformers.

SILENCE is after `load_hparams` and `load_arch_hparams` of llama.cpp: src/llama-model.cpp and src/models, November 2026.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.formats.gguf import GGUFCheckpoint
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.gguf_files import GGUF_ARCHS, list_metadata, tiny_for_gguf, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

REQUIRED = "required"
UNUSED = "unused"  # by the models that are read here
Keys = Mapping[str, Any]  # metadata, less the name of the architecture
Silence = Any | Callable[[Keys], Any]  # a value, or what it follows from


def head_size(keys: Keys) -> int:
    return int(keys["embedding_length"] // keys["attention.head_count"])


def key_length(keys: Keys) -> int:
    return int(keys.get("attention.key_length", head_size(keys)))


def expert_width(keys: Keys) -> int:
    return int(keys["feed_forward_length"] // keys["expert_used_count"])


def of(key: str) -> Callable[[Keys], Any]:
    return lambda keys: keys[key]


# What llama.cpp takes in place of a key, in all architectures but those of EXCEPTIONS.
SILENCE: dict[str, Silence] = {
    **dict.fromkeys(("block_count", "context_length", "embedding_length"), REQUIRED),
    **dict.fromkeys(("attention.head_count", "feed_forward_length"), REQUIRED),  # llama.cpp takes 0, and fails later
    "attention.head_count_kv": of("attention.head_count"),
    "attention.key_length": head_size,
    "attention.value_length": head_size,
    "attention.layer_norm_epsilon": REQUIRED,
    "attention.layer_norm_rms_epsilon": REQUIRED,
    "attention.scale": 0.0,
    "attention.temperature_scale": 0.0,
    "attention.sliding_window": REQUIRED,
    "attention.shared_kv_layers": 0,
    "attention.key_length_swa": REQUIRED,
    "attention.value_length_swa": REQUIRED,
    "attention.kv_lora_rank": REQUIRED,
    "attention.q_lora_rank": 0,  # required, except in models whose numbers of layers are known
    "attention.key_length_mla": of("attention.key_length"),
    "attention.value_length_mla": of("attention.value_length"),
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": REQUIRED,
    "final_logit_softcapping": 30.0,
    "embedding_length_per_layer_input": REQUIRED,
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": of("rope.freq_base"),
    "rope.dimension_count": key_length,
    "rope.dimension_count_swa": of("rope.dimension_count"),
    "rope.dimension_sections": UNUSED,
    "rope.scale_linear": 0.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": lambda keys: keys.get("rope.scale_linear", 0.0),
    "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": of("context_length"),
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "expert_count": REQUIRED,
    "expert_used_count": REQUIRED,
    "expert_feed_forward_length": REQUIRED,
    "expert_shared_count": REQUIRED,
    "expert_shared_feed_forward_length": 0,
    "expert_group_count": 0,
    "expert_group_used_count": lambda keys: REQUIRED if keys["expert_group_count"] > 1 else 0,
    "expert_weights_norm": False,
    "expert_weights_scale": 0.0,
    "expert_gating_func": REQUIRED,
    "leading_dense_block_count": 0,
    "shortconv.l_cache": REQUIRED,
    **{f"ssm.{key}": REQUIRED for key in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")},
    "full_attention_interval": 4,
    "use_parallel_residual": REQUIRED,
    "vocab_size": UNUSED,
}
NEVER_WRITTEN = ("rope.scale_linear", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
EXPERTS_OF_QWEN = {
    "feed_forward_length": UNUSED,
    "expert_feed_forward_length": expert_width,
    "expert_shared_feed_forward_length": of("feed_forward_length"),
}
EXCEPTIONS: dict[str, dict[str, Silence]] = {
    "cohere2": {"attention.sliding_window_pattern": 4},
    "deepseek2": {
        "rope.dimension_count": REQUIRED,  # llama.cpp takes the size of a head, none of which is left then
        "expert_gating_func": UNUSED,  # a tensor says it, or else 1, softmax: see test_gguf_latent.py
    },
    "gemma3": {
        "attention.sliding_window": 0,
        "attention.sliding_window_pattern": 6,
        "rope.freq_base_swa": 10000.0,
        "final_logit_softcapping": 0.0,
    },
    "gemma4": {"attention.sliding_window_pattern": REQUIRED, "rope.freq_base_swa": 10000.0},
    "glm4moe": {"expert_gating_func": 2, "leading_dense_block_count": REQUIRED},
    "gpt-oss": {"feed_forward_length": UNUSED, "attention.sliding_window_pattern": 2},
    "granitehybrid": {"logit_scale": 0.0, "expert_count": 0, "expert_used_count": UNUSED},
    "muse-glimmer": {"attention.sliding_window_pattern": 4},
    "nemotron_h_moe": {
        **dict.fromkeys(("expert_feed_forward_length", "expert_shared_count", "rope.dimension_count"), UNUSED),
        "rope.scaling.finetuned": UNUSED,
        "attention.layer_norm_rms_epsilon": of("attention.layer_norm_epsilon"),
        "attention.layer_norm_epsilon": UNUSED,  # that of MTP layers
        "expert_gating_func": 2,
    },
    "olmo2": {"attention.sliding_window": 0, "attention.sliding_window_pattern": 4},
    "phi3": {"attention.sliding_window": 0, "rope.scaling.attn_factor": 1.0},
    "qwen3moe": EXPERTS_OF_QWEN,
    "qwen3next": EXPERTS_OF_QWEN,
    "qwen35moe": EXPERTS_OF_QWEN,
}
LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 64},
    **{"long_factor": [2.0 + i for i in range(8)], "short_factor": [1.25] * 8},
}
SPECIAL: dict[str, TinyCheckpoint] = {"longrope": tiny_checkpoint("phi3", rope_scaling=LONGROPE)}


def read(path: Path, checkpoint: TinyCheckpoint, extra: Keys) -> dict[str, Any] | str:
    """Return the config of a file with `extra` metadata; the error where there is one."""
    arch, _ = list_metadata(checkpoint)
    try:
        return GGUFCheckpoint(
            write_gguf(path, checkpoint, extra={f"{arch}.{key}": value for key, value in extra.items()})
        ).config
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize("name", [*GGUF_ARCHS, *SPECIAL])
def test_a_missing_key_has_the_value_of_llama_cpp(tmp_path: Path, name: str) -> None:
    checkpoint = SPECIAL.get(name) or tiny_for_gguf(name)
    arch, keys = list_metadata(checkpoint)
    silence = SILENCE | EXCEPTIONS.get(arch, {})
    assert keys.keys() <= silence.keys(), "a key of which nobody knows what its absence means"
    optional = {key for key in (*NEVER_WRITTEN, *EXCEPTIONS.get(arch, {})) if key in silence}
    for key in sorted(keys.keys() | optional):
        others = {k: v for k, v in keys.items() if k != key}
        value = silence[key]
        value = value(others) if callable(value) else value
        missing = read(tmp_path / "m.gguf", checkpoint, {key: None})
        if value == REQUIRED:
            assert isinstance(missing, str) and f"{arch}.{key} is missing" in missing and "\n" not in missing, key
        elif value != UNUSED:
            assert missing == read(tmp_path / "m.gguf", checkpoint, {key: value}), key


def compute_logits(checkpoint: GGUFCheckpoint | TinyCheckpoint) -> Tensor:
    return run_decoder(build_model(Weights(checkpoint, torch.float32)), [random_tokens(40)], [[40]])[0]


def empty_defaults(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """Take all defaults of transformers from a family, so that it finds none where a config is silent."""
    family = importlib.import_module(f"retain.models.families.{model_type}")
    for name in ("DEFAULTS", "ROPE_DEFAULTS", "ATTENTION_DEFAULTS", "THETA"):
        monkeypatch.setattr(family, name, defaultdict(dict), raising=False)


@pytest.mark.parametrize("name", [*GGUF_ARCHS, *SPECIAL])
def test_no_default_of_a_config_class_reaches_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The file says as little as llama.cpp can do with, without a change of sizes."""
    checkpoint = SPECIAL.get(name) or tiny_for_gguf(name)
    arch, keys = list_metadata(checkpoint)
    silence = SILENCE | EXCEPTIONS.get(arch, {})
    needed = ("attention.max_alibi_bias",)  # without it there are no positions
    silent = [k for k in keys if isinstance(silence[k], float | bool) or k.startswith("rope.scaling")]
    extra = {f"{arch}.{key}": None for key in silent if key not in needed}
    path = write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra)
    expected = compute_logits(GGUFCheckpoint(path))
    empty_defaults(monkeypatch, GGUFCheckpoint(path).config["model_type"])
    assert torch.equal(compute_logits(GGUFCheckpoint(path)), expected)


@pytest.mark.parametrize("scaling", [{}, {"rope.scaling.type": "none", "rope.scaling.factor": 32.0}], ids=str)
def test_gpt_oss_without_scaling_has_none(tmp_path: Path, scaling: Keys) -> None:
    arch, keys = list_metadata(tiny_checkpoint("gpt_oss"))
    silent = {key: None for key in keys if key.startswith("rope.scaling.")}
    extra = {f"{arch}.{key}": value for key, value in {**silent, **scaling}.items()}
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("gpt_oss"), extra=extra)
    expected = compute_logits(tiny_checkpoint("gpt_oss", rope_scaling={"rope_type": "default"}))
    torch.testing.assert_close(compute_logits(GGUFCheckpoint(path)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_olmo3_has_one_attention_factor_under_either_key(tmp_path: Path, key: str) -> None:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.75}
    checkpoint = tiny_checkpoint("olmo3", rope_scaling=rope)
    names = ("attn_factor", "yarn_attn_factor")
    extra = {f"olmo2.rope.scaling.{name}": 1.75 if name == key else None for name in names}
    path = write_gguf(tmp_path / "m.gguf", checkpoint, extra=extra)
    torch.testing.assert_close(compute_logits(GGUFCheckpoint(path)), compute_logits(checkpoint), atol=1e-4, rtol=1e-4)
