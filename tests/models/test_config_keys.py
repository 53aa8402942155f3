"""Every family reads exactly the keys that transformers reads for it, with its defaults, and every tensor of a file.

transformers opens the folder itself. Its logits of one forward pass are compared, without its cache: from a
`sliding_window` in any config, its cache makes a window that the model itself does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from retain import models
from retain.models.family_config import FamilyConfig
from retain.models.rope import ROPE_DEFAULTS
from retain.models.weights import Weights, open_weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.family_variants import Changes
from tests.helpers.folders import save_model_folder
from tests.helpers.tiny_models import MULTIMODAL, tiny_checkpoint

FULL, SLIDING = ["full_attention"] * 3, ["sliding_attention"] * 3
# Keys of other families at values that would change the answer if they were obeyed.
QWEN = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
GEMMA = {
    "query_pre_attn_scalar": 3,
    "sliding_window": 4,
    "sliding_window_pattern": 1,
    "layer_types": SLIDING,
    "rope_local_base_freq": 3.0,
    "hidden_activation": "relu",
    "final_logit_softcapping": 0.1,
    "attn_logit_softcapping": 0.1,
    "use_bidirectional_attention": True,
}
GPT = {
    "rotary_dim": 4,
    "rotary_pct": 0.5,
    "rotary_emb_base": 3.0,
    "activation_function": "relu",
    "layer_norm_epsilon": 1.0,
    "layer_norm_eps": 1.0,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "use_parallel_residual": False,
    "do_layer_norm_before": False,
    "attn_config": {"softmax_scale": 3.0, "clip_qkv": 0.01},
    "logit_scale": 0.1,
    "no_bias": False,
}
ROPE = {
    "rope_theta": 3.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "partial_rotary_factor": 0.5,
    "rope_local_base_freq": 3.0,
    "original_max_position_embeddings": 8,
}
BIASES = {"attention_bias": False, "mlp_bias": False, "enable_bias": False}
WINDOW = {"sliding_window": 8}
CASES: list[tuple[str, Changes]] = [
    ("llama", WINDOW),
    ("llama", {**WINDOW, "use_sliding_window": False}),
    ("llama", {**QWEN, "layer_types": SLIDING}),
    ("llama", GEMMA),
    ("llama", GPT),
    ("llama", {"partial_rotary_factor": 0.5}),
    ("mistral", {"use_sliding_window": False, "max_window_layers": 3}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {**GEMMA, "sliding_window": 8, "attention_bias": False}),
    ("mistral", GPT),
    ("qwen2", {**QWEN, "use_sliding_window": False}),
    ("qwen2", {**BIASES, **QWEN, "max_window_layers": 2}),
    ("qwen2", {**GEMMA, "use_sliding_window": False, "layer_types": FULL}),
    ("qwen2", {"partial_rotary_factor": 0.5, "head_dim": 16}),
    ("qwen3", {**QWEN, "max_window_layers": 1}),
    ("qwen3", {**GPT, "mlp_bias": False}),
    ("gemma3_text", {"use_sliding_window": False, "max_window_layers": 9, "hidden_act": "relu"}),
    ("gemma3_text", {**GPT, "partial_rotary_factor": 0.5}),
    ("olmo3", {**GPT, "max_window_layers": 0, "rope_theta": 50.0, "rope_local_base_freq": 3.0}),
    ("olmo3", {"rope_theta": 3.0, "rope_parameters": {"full_attention": {"rope_theta": 50.0}}}),
    ("olmo2", {**WINDOW, "layer_types": SLIDING, "mlp_bias": False, "partial_rotary_factor": 0.5}),
    ("gpt2", {**QWEN, **BIASES, "hidden_act": "relu", "layer_norm_eps": 1.0}),
    ("gpt2", {**ROPE, "rotary_dim": 4, "use_parallel_residual": True, "attn_config": GPT["attn_config"]}),
    ("gptj", {**ROPE, **QWEN, **BIASES, "hidden_act": "relu", "rotary_pct": 0.5}),
    ("gpt_neox", {"rope_theta": 3.0, "partial_rotary_factor": 1.0, **QWEN, "layer_norm_epsilon": 1.0}),
    ("gpt_neox", {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0}, "rotary_dim": 4}),
    ("mpt", {**ROPE, **QWEN, "softmax_scale": 3.0, "clip_qkv": 0.01, "activation_function": "relu"}),
    ("opt", {**ROPE, **QWEN, "attention_bias": False, "hidden_act": "gelu", "layer_norm_epsilon": 1.0}),
    # Two styles at once, and names that are one.
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0}}),
    (
        "llama",
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0},
        },
    ),
    ("gpt2", {"hidden_size": 64, "num_hidden_layers": 2}),
    ("mpt", {"num_hidden_layers": 2}),
]


def load_transformers_model(folder: Path) -> Any:
    """Load a folder as users of transformers do."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def compute_transformers_logits(folder: Path, text: Tensor) -> Tensor:
    return load_transformers_model(folder)(text[None], use_cache=False).logits[0].float()


def assert_equals_transformers(folder: Path) -> None:
    """Compare logits, and so the greedy tokens, of a text that is longer than every window here."""
    text = random_tokens(40)
    (ours,) = run_decoder(build_model(open_weights(folder, torch.float32)), [text], [[7], [7], [26]])
    theirs = compute_transformers_logits(folder, text)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=5e-5, rtol=0)


def write_folder(folder: Path, family: str, changes: Changes, **other_tensors: Tensor) -> Path:
    """Write a tiny model whose config.json has `changes`; its tensors are those of the unchanged config, or others."""
    checkpoint = tiny_checkpoint(family)
    if layers := changes.get("num_hidden_layers"):
        checkpoint.shapes = {n: s for n, s in checkpoint.shapes.items() if f".{layers}." not in n}
    checkpoint.config |= changes
    save_model_folder(folder, checkpoint)
    save_file(load_file(folder / "model.safetensors") | other_tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{i} {family}" for i, (family, _) in enumerate(CASES)])
def test_keys_of_other_families_count_as_in_transformers(tmp_path: Path, family: str, changes: Changes) -> None:
    assert_equals_transformers(write_folder(tmp_path, family, changes))


# Keys of configs of older styles, which transformers converts.
INTERVAL = {"full_attention_interval"}
OLDER_KEYS = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), INTERVAL) | {
    "gpt_neox": {"rotary_pct", "rotary_emb_base"},
    "gemma3_text": {"rope_theta", "rope_local_base_freq", "sliding_window_pattern"},
    "nemotron_h": {"layer_types", "hybrid_override_pattern"},
}
HEAD_DIM = {"head_dim"}  # not a field of these classes; their models ask for it
OPTIONAL_FIELDS = dict.fromkeys(
    (
        "qwen2",
        "qwen3_moe",
        "smollm3",
        "phi3",
        "granite",
        "granite_swa",
        "olmo2",
        "olmo3",
        "lfm2",
        "lfm2_moe",
        "granitemoe",
        "granitemoeshared",
        "granitemoehybrid",
        "glm4_moe",
    ),
    HEAD_DIM,
)
OPTIONAL_FIELDS["gemma4_text"] = {"global_head_dim", "num_global_key_value_heads"}  # become a per_layer_config
SHARED_KEYS = {"rope_scaling", "original_max_position_embeddings", "model_type"}
ROPE_KEYS = {"rope_theta", "partial_rotary_factor"}
TEXT_FAMILIES = [family for family in models.list_families() if family not in MULTIMODAL]


def get_fields(family: str) -> dict[str, Any]:
    """Return the fields of transformers' config class with their defaults."""
    from transformers import CONFIG_MAPPING

    return {f.name: f.default for f in fields(CONFIG_MAPPING[family])}


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    from transformers import CONFIG_MAPPING

    defaults, theirs = models.load_family(family).DEFAULTS, get_fields(family)
    older = OLDER_KEYS.get(family, set()) | OPTIONAL_FIELDS.get(family, set())
    assert {k: v for k, v in defaults.items() if k not in older} == {k: theirs[k] for k in defaults if k not in older}
    rope = getattr(CONFIG_MAPPING[family](), "rope_parameters", None)
    if family in ("gemma4_text", "olmo3"):
        assert models.load_family(family).ROPE_DEFAULTS == rope
    elif family == "gemma3_text":
        thetas = defaults["rope_theta"], defaults["rope_local_base_freq"]
        assert thetas == (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"])
    elif rope is not None:
        ours = getattr(models.load_family(family), "ROPE_DEFAULTS", ROPE_DEFAULTS)
        repeated = {"type", "max_position_embeddings"}  # what the config says beside them
        assert {"rope_type": "default", **ours} == {k: v for k, v in rope.items() if k not in repeated}


@pytest.mark.slow
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_key_that_a_family_reads_is_one_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import CONFIG_MAPPING

    read: set[str] = set()

    def record(name: str) -> Callable[..., Any]:
        function = getattr(dict, name)

        def recorded(self: FamilyConfig, key: str, *args: Any) -> Any:
            if "model_type" in self:  # not parameters of RoPE
                read.add(key)
            return function(self, key, *args)

        return recorded

    with monkeypatch.context() as m:
        m.setattr(FamilyConfig, "__getitem__", record("__getitem__"))
        m.setattr(FamilyConfig, "get", record("get"))
        build_model(Weights(tiny_checkpoint(family), torch.float32))
    known = get_fields(family).keys() | OLDER_KEYS.get(family, set()) | OPTIONAL_FIELDS.get(family, set())
    rope = ROPE_KEYS | SHARED_KEYS if "rope_parameters" in known and family != "gpt_neox" else SHARED_KEYS
    assert len(read) > 5
    assert read <= known | rope | {"per_layer_config"}
    assert hasattr(CONFIG_MAPPING[family](), "per_layer_config")  # refused in every family
