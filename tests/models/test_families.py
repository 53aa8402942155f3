"""Law 7: every family equals transformers in float32 on tiny random weights, for any chunking of the tokens.

transformers loads the config and the tensors of tests/helpers/tiny_models.py, strictly by name and shape.
"""

from __future__ import annotations

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import models
from retain.models.weights import Weights, open_weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.family_variants import VARIANTS, Changes, each_variant
from tests.helpers.tiny_models import CONFIGS, MULTIMODAL, TinyCheckpoint, has_states, tiny_checkpoint, tiny_model

each_family = pytest.mark.parametrize("family", models.list_families())
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}

QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
}
MUSE_VISION = {
    "vision_config": {
        **{k: VISION[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "patch_size": 2,
    },
    "out_hidden_size": 64,
    "projector_hidden_size": 16,
}


@torch.inference_mode()
def transformers_logits(checkpoint: TinyCheckpoint, text: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the logits [T, V] by transformers from the same config and tensors."""
    model = build_transformers_model(checkpoint)
    model = model if dtype == torch.float32 else deepcopy(model).to(dtype)
    return model(text[None]).logits[0].float()


def build_transformers_model(checkpoint: TinyCheckpoint) -> Any:
    """Load the checkpoint into transformers, once for all laws; nobody changes the model."""
    shapes = tuple(checkpoint.shapes.items())
    return load_into_transformers(type(checkpoint), json.dumps(checkpoint.config), shapes, checkpoint.seed)


@cache
def load_into_transformers(
    kind: type[TinyCheckpoint], config_json: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], seed: int
) -> Any:
    """Load a checkpoint into transformers. Asserts that no tensor is unknown, missing or of another shape."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads(config_json)
    checkpoint = kind(config.copy(), dict(shapes), seed)
    model_type, auto, prefix = config.pop("model_type"), AutoModelForCausalLM, ("", "")
    if model_type == "gemma3":
        config, auto = {**config, "vision_config": VISION, "mm_tokens_per_image": 4}, AutoModelForImageTextToText
    elif model_type in ("qwen3_5", "qwen3_5_moe"):
        config, auto = {**config, "vision_config": QWEN_VISION}, AutoModelForImageTextToText
    elif model_type.startswith("muse_glimmer"):
        is_text = model_type == "muse_glimmer_text"
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
        config = {"text_config": config if is_text else config["text_config"], **MUSE_VISION, **tied}
        model_type, auto = "muse_glimmer", AutoModelForImageTextToText
        prefix = ("model.", "model.language_model.") if is_text else prefix
    model = auto.from_config(AutoConfig.for_model(model_type, **config), attn_implementation="eager").eval()
    tensors = stack_experts({name.replace(*prefix, 1): checkpoint.read(name) for name in checkpoint.names()})
    result = model.load_state_dict(tensors, strict=False)
    vision = ("vision_tower", "projector", "model.visual.", "model.vision_")
    missing = {name for name in result.missing_keys if not any(part in name for part in vision)}
    assert not result.unexpected_keys and missing <= {"lm_head.weight"}
    return model


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of each layer, as transformers does when it reads a published file."""
    by_layer: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in list(tensors):
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+?)(_proj)?\.weight", name):
            part = {"w1": "gate", "w3": "up", "w2": "down"}.get(found[3], found[3])
            by_layer.setdefault(found[1], {})[int(found[2]), part] = tensors.pop(name)
    for prefix, parts in by_layer.items():
        n = len({e for e, _ in parts})
        gate_up = [torch.cat((parts[e, "gate"], parts[e, "up"])) for e in range(n)]
        tensors[prefix + ".gate_up_proj"] = torch.stack(gate_up)
        tensors[prefix + ".down_proj"] = torch.stack([parts[e, "down"] for e in range(n)])
    return tensors


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.5  # so that logits differ clearly
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=5e-5, rtol=0)


@pytest.mark.slow
@each_variant
def test_logits_equal_transformers(family: str, changes: Changes) -> None:
    checkpoint = tiny_checkpoint(family, **changes)
    model, ids = build_model(Weights(checkpoint, torch.float32)), random_tokens(40)
    theirs = transformers_logits(checkpoint, ids)
    for name, steps in {
        "prefill": [40],
        "chunks": [1, 3, 7, 1, 3, 7, 18],
        "decode": [31] + [1] * 9,  # over the ends of pages
    }.items():
        (ours,) = run_decoder(model, [ids], [[n] for n in steps])
        try:
            assert_close(ours, theirs)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e


@pytest.mark.slow
@each_family
def test_batched_requests_of_different_lengths_equal_transformers(family: str) -> None:
    checkpoint, texts = tiny_checkpoint(family), [random_tokens(40), random_tokens(23, seed=1)]
    steps = [[20, 3], [1, 10], [0, 9], [18, 1], [1, 0]]
    ours = run_decoder(build_model(Weights(checkpoint, torch.float32)), texts, steps)
    for logits, ids in zip(ours, texts, strict=True):
        assert_close(logits, transformers_logits(checkpoint, ids))


@pytest.mark.slow
@each_variant
def test_config_written_by_transformers_5_gives_equal_logits(family: str, changes: Changes) -> None:
    checkpoint = tiny_checkpoint(family, **changes)
    (ours,) = run_decoder(build_model(Weights(checkpoint, torch.float32)), [random_tokens(40)], [[40]])
    config = json.loads(build_transformers_model(checkpoint).config.to_json_string(use_diff=False))
    assert "rope_theta" not in config
    rewritten = TinyCheckpoint(config, checkpoint.shapes, checkpoint.seed)
    (again,) = run_decoder(build_model(Weights(rewritten, torch.float32)), [random_tokens(40)], [[40]])
    assert torch.equal(ours, again)


@pytest.mark.slow
@each_family
def test_bfloat16_error_is_close_to_that_of_transformers(family: str) -> None:
    checkpoint, ids = tiny_checkpoint(family), random_tokens(40)
    (ours,) = run_decoder(tiny_model(family, torch.bfloat16), [ids], [[20], [20]])
    exact = transformers_logits(checkpoint, ids)
    rounded = transformers_logits(checkpoint, ids, torch.bfloat16)
    # Of most tokens: one that takes another expert for a last bit differs by far more.
    error, theirs = ((logits - exact).std(dim=1).median() for logits in (ours, rounded))
    assert ours.dtype == torch.float32
    assert 0 < error < 1.3 * theirs < 0.3 * exact.std()


class LowScores(TinyCheckpoint):
    """A tiny model whose experts agree: about half of the tokens have far less than 0 as the score of each."""

    def read(self, name: str) -> Tensor:
        x = super().read(name)
        return 6 * x[:1] + x / 4 if name.endswith("gate.weight") else x


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2_moe", "deepseek_v3"])
def test_small_sums_of_scores_are_divided_as_in_transformers(family: str) -> None:
    tiny = tiny_checkpoint(family)
    checkpoint = LowScores(tiny.config, tiny.shapes, tiny.seed)
    text = random_tokens(40)
    (ours,) = run_decoder(build_model(Weights(checkpoint, torch.float32)), [text], [[40]])
    assert_close(ours, transformers_logits(checkpoint, text))


def test_every_family_has_a_tiny_model() -> None:
    assert sorted(CONFIGS) == sorted(VARIANTS) == models.list_families()


@pytest.mark.slow
def test_mpt_uses_alibi_bias_max() -> None:
    """transformers has the formula, but its model never applies it to the config's value."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads, bias_max in ((4, 8), (8, 16), (6, 4), (12, 5), (1, 8)):
        config = {**CONFIGS["mpt"], "n_heads": heads, "d_model": 96, "attn_config": {"alibi_bias_max": bias_max}}
        theirs = -build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]  # distance 1
        ours = models.load_family("mpt").spec_from_config(config).attention.alibi_slopes
        torch.testing.assert_close(ours, theirs)


class RenamedCheckpoint:
    """A checkpoint with other tensor names."""

    def __init__(self, checkpoint: TinyCheckpoint, old: str, new: str):
        self.config, self.checkpoint = checkpoint.config, checkpoint
        self.old_names = {name.replace(old, new): name for name in checkpoint.names()}

    def names(self) -> set[str]:
        return set(self.old_names)

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(self.old_names[name])

    def read_stored(self, name: str, transposed: bool = False) -> None:
        return None


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama", "model.", ""),
        ("gemma3_text", "model.", ""),
        ("gemma3", "model.language_model.", "language_model.model."),  # files on the hub
        ("gemma3", "model.language_model.", "model."),  # the text model alone
        ("gpt2", "transformer.", ""),  # OpenAI's own
        ("gptj", "transformer.", ""),
        ("mpt", "transformer.", ""),
        ("qwen3_5", "model.language_model.", "model."),  # the text model alone
        ("qwen3_5_text", "model.", "model.language_model."),
        ("opt", "model.decoder.", "decoder."),
        ("gpt_neox", "gpt_neox.", ""),
        ("gpt_neox", "lm_head", "embed_out"),  # files on the hub
        ("nemotron_h", "model.", "backbone."),  # files on the hub
        ("nemotron_h", "model.", ""),
        ("granitemoehybrid", "model.", ""),
    ],
)
def test_other_tensor_names_load_the_same_model(family: str, old: str, new: str) -> None:
    checkpoint = tiny_checkpoint(family)
    decoders = [build_model(Weights(s, torch.float32)) for s in (checkpoint, RenamedCheckpoint(checkpoint, old, new))]
    a, b = (run_decoder(d, [random_tokens(9)], [[9]])[0] for d in decoders)
    assert torch.equal(a, b)


SOFTCAP = {"final_logit_softcapping": 30.0}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json lacks 'low_freq_factor'"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope parameters for 'full_attention'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ("llama", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ("llama", {"hidden_size": None}, "the tensors of the model do not fit its config"),  # 4096 is the default
        ("llama", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config={'0': {'head_dim': 8}} is not"),
        ("llama", {"model_type": None}, "config.json lacks 'model_type'"),
        ("llama", {"num_attention_heads": 3}, "do not fit its config"),
        ("llama", {"num_key_value_heads": 4}, "do not fit its config"),
        ("llama", {"num_attention_heads": 0}, "do not fit its config"),
        ("llama", {"num_attention_heads": "many"}, "config.json has a value that cannot be used"),
        ("llama", {"vocab_size": 127}, "do not fit its config: the output of a linear layer"),
        ("llama", {"vocab_size": 129}, "do not fit its config"),
        ("llama", {"num_hidden_layers": 4}, "no tensor 'model.layers.3."),
        ("llama", {"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
        (
            "ministral3",
            {"rope_parameters": {**CONFIGS["ministral3"]["rope_parameters"], "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings is 0.5, not a whole number above 0",
        ),
        ("muse_glimmer_text", {"layer_rope_theta": [5.0] * 5}, "is [5.0, 5.0, 5.0, 5.0, 5.0], not 0 or 10000.0 for"),
        ("muse_glimmer_text", {"layer_rope_theta": [0] * 4}, "not 0 or 10000.0 for each of 5 layers"),
        ("muse_glimmer_text", {"layer_rope_theta": [[]] * 5}, "not 0 or 10000.0 for each of 5 layers"),
        ("glm4", {"partial_rotary_factor": 1e8}, "partial_rotary_factor is 100000000.0, not a number above 0 up to 1"),
        ("smollm3", {"no_rope_layers": "abcd"}, "no_rope_layers is 'abcd', not 0 or 1 for each of 4 layers"),
        ("olmo2", {"num_key_value_heads": 4}, "the tensors of the model do not fit its config"),
        ("olmo3", {"layer_types": ["conv"] * 4}, "is not supported: one of full_attention, sliding_attention for"),
        ("olmo3", {"rope_parameters": {"rope_theta": 5.0}}, "rope parameters without a type of layers are not"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "rope type 'dynamic' is not supported",
        ),
        (
            "olmo3",
            {"rope_scaling": {**CONFIGS["olmo3"]["rope_scaling"], "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ("qwen3", {"hidden_act": "swiglu_oai"}, "activation 'swiglu_oai' is not supported"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 2**40}}}, "per_layer_config"),
        ("llama", {"model_type": "mamba"}, "model type 'mamba' is not supported: one of cohere2, "),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ("gemma3_text", SOFTCAP, "final_logit_softcapping=30.0 is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3", {"text_config": {**CONFIGS["gemma3_text"], **SOFTCAP}}, "final_logit_softcapping=30.0"),
        ("gemma3", {"text_config": None}, "config.json lacks 'text_config'"),
        ("mpt", {"n_heads": 0}, "config.json has a value that cannot be used"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("gpt2", {"n_positions": 513}, "do not fit its config"),
        ("gptj", {"rotary_dim": 24}, "do not fit its config"),
        ("mpt", {"no_bias": False}, "no_bias=False is not supported"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale='inv_sqrt_d_model' is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False is not supported"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=True is not supported"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm=True is not supported"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type='multiquery_attention'"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False is not supported"),
        ("opt", {"max_position_embeddings": 513}, "do not fit its config"),
        ("lfm2", {"layer_types": ["linear_attention"] * 4}, "is not supported: one of conv, full_attention for"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs is 1, not a list of layers"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [[1]]}, "full_attn_idxs is [[1]], not a list of layers"),
        ("qwen3_next", {"linear_num_key_heads": 32768}, "do not fit its config"),
        ("qwen3_next", {"num_attention_heads": 32768}, "do not fit its config"),
        ("qwen3_5_text", {"linear_num_value_heads": 65536}, "do not fit its config"),
        ("lfm2_moe", {"layer_types": None}, "layer_types [] is not supported: one of conv, full_attention for"),
        ("lfm2", {"hidden_size": 72}, "a convolution over 72 channels is not supported: only over multiples of 16"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, "is not supported: one of linear_attention, full_attention for"),
        ("qwen3_5_text", {"linear_key_head_dim": 20}, "heads of 20 numbers is not supported: only multiples of 8"),
        (
            "qwen3_5_text",
            {"linear_conv_kernel_dim": 5},
            "do not fit its config: a convolution has a weight [160, 1, 4]",
        ),
        ("qwen3_next", {"linear_num_key_heads": 3}, "do not fit its config"),
        ("qwen3_5_text", {"linear_num_value_heads": 6}, "do not fit its config"),
        ("lfm2", {"conv_L_cache": 4}, "do not fit its config: a convolution has a weight [64, 1, 3], but [64, 1, 4]"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, not a multiple of 2"),
        ("deepseek_v3", {"kv_lora_rank": 24}, "do not fit its config"),
        ("deepseek_v3", {"qk_rope_head_dim": 6}, "do not fit its config"),
        ("deepseek_v3", {"v_head_dim": 8}, "do not fit its config"),
        ("deepseek_v3", {"num_attention_heads": 65536}, "do not fit its config"),
        ("deepseek_v3", {"topk_group": 3}, "a router that takes 2 of 0 experts is not possible"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "config.json lacks 'factor'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported: greedy or group_"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "config.json has a value that cannot be used"),
        ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types ['moe', 'moe', 'moe'] is not supported"),
        (
            "glm4_moe_lite",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ("gpt_neox", {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("granitemoehybrid", {"mamba_d_state": 20}, "heads of 20 numbers is not supported: only multiples of 8"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "8 heads of Mamba-2 cannot share 3 groups"),
        ("granitemoehybrid", {"mamba_n_groups": 1}, "do not fit its config: a convolution has a weight [224, 1, 4]"),
        ("granitemoehybrid", {"mamba_n_heads": 16}, "do not fit its config: in_proj, norm and conv1d of Mamba-2 have"),
        (
            "granitemoehybrid",
            {"mamba_d_head": 8},
            "8 heads of Mamba-2 with 8 numbers are not mamba_expand x hidden_size",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 3},
            "3 heads of Mamba-2 with 42 numbers are not mamba_expand x hidden_size",
        ),
        ("granitemoehybrid", {"mamba_d_conv": 3}, "do not fit its config: a convolution has a weight [224, 1, 4]"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "no tensor 'model.layers.0.mamba.in_proj.bias'"),
        ("granitemoehybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit is [1.0, 0.5], not two numbers"),
        ("granitemoehybrid", {"time_step_limit": 3}, "time_step_limit is 3, not two numbers"),
        ("granitemoehybrid", {"time_step_limit": [[], {}]}, "time_step_limit is [[], {}], not two numbers"),
        (
            "granitemoehybrid",
            {"layer_types": ["conv"] * 4},
            "is not supported: one of linear_attention, full_attention",
        ),
        ("granitemoehybrid", {"num_local_experts": 5}, "has the shape [6, 64, 64], not that of 5 experts"),
        ("nemotron_h", {"moe_latent_size": 16}, "no tensor 'model.layers.2.mixer.fc1_latent_proj.weight'"),
        ("nemotron_h", {"sliding_window": 16}, "sliding_window=16 is not supported (only None)"),
        (
            "nemotron_h",
            {"layer_types": None, "hybrid_override_pattern": "M*X"},
            "is not supported: one of linear_attention",
        ),
        ("nemotron_h", {"layer_types": None, "hybrid_override_pattern": 5}, "the types of layers are 5, not a list"),
        ("nemotron_h", {"layer_types": None}, "no tensor 'model.layers.1.mixer.gate."),
        ("nemotron_h", {"layer_types": [[], {}]}, "is not supported: one of linear_attention"),
        ("nemotron_h", {"n_routed_experts": 16}, "has the shape [8, 32, 64], not that of 16 experts"),
        ("nemotron_h", {"layer_types": ["mlp"] * 4}, "a model without layers of Mamba-2 or attention is not supported"),
        ("nemotron_h", {"layer_types": []}, "a model without layers of Mamba-2 or attention is not supported"),
        ("nemotron_h", {"n_group": 3}, "do not fit its config"),
        ("nemotron_h", {"n_routed_experts": 0}, "has the shape [8, 32, 64], not that of 0 experts"),
        ("nemotron_h", {"mlp_hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
    ],
)
def test_unsupported_configs_raise_one_line_errors(family: str, changes: Changes, message: str) -> None:
    checkpoint = tiny_checkpoint(family, tie_word_embeddings=True)  # the file has no lm_head
    checkpoint.config = {k: v for k, v in {**checkpoint.config, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        build_model(Weights(checkpoint, torch.float32))
    assert "\n" not in str(e.value)


def test_biases_of_only_some_projections_are_refused() -> None:
    checkpoint = tiny_checkpoint("qwen2")
    del checkpoint.shapes["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.bias'"):
        build_model(Weights(checkpoint, torch.float32))


@pytest.mark.slow
@each_family
def test_greedy_tokens_of_an_engine_equal_transformers(family: str) -> None:
    """Of a text that is longer than several pages of states."""
    prompt = random_tokens(70, seed=2).tolist()
    engine = make_engine(family, backend="reference", max_batched_tokens=33)
    (answer,) = run_to_completion(engine, [make_request(prompt, 14)])
    logits = transformers_logits(tiny_checkpoint(family), torch.tensor(prompt + answer))
    assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in CONFIGS if has_states(family) or family in MULTIMODAL])
def test_folder_saved_by_transformers_gives_equal_logits(tmp_path: Path, family: str) -> None:
    """transformers saves tensors under the names of published files, with those of its vision model."""
    build_transformers_model(tiny_checkpoint(family)).save_pretrained(tmp_path)
    (ours,) = run_decoder(build_model(open_weights(tmp_path, torch.float32)), [random_tokens(40)], [[40]])
    assert_close(ours, transformers_logits(tiny_checkpoint(family), random_tokens(40)))
