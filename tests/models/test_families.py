"""Law 7: every family equals transformers, in float32, on tiny random weights, however the tokens arrive.

tests/tiny.py makes weights and config; transformers gets both, strictly by name and shape, and is the judge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from retain import models
from retain.kernels import reference
from retain.kernels.api import NO_WINDOW, Tables
from retain.models.decoder import Attend, Decoder, ModelSpec
from retain.models.weights import Weights
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, tiny_checkpoint, tiny_model

Changes = dict[str, Any]
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}

VARIANTS: dict[str, list[Changes]] = {
    "llama": [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "beta_fast": 8.0, "truncate": False}},
    ],
    "mistral": [{"sliding_window": 1}],
    "qwen2": [
        {"use_sliding_window": False},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
    "qwen3": [{"attention_bias": True, "tie_word_embeddings": False}, {"num_key_value_heads": 4, "head_dim": 8}],
    "gemma3_text": [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        {"sliding_window_pattern": 3, "attention_bias": True},
    ],
    "gemma3": [],
    "gpt2": [
        {"n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False},  # as Cerebras-GPT
        {"scale_attn_weights": False, "n_embd": 32},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
    "gptj": [{"rotary_dim": 16}, {"tie_word_embeddings": True, "n_inner": 40, "activation_function": "silu"}],
    "mpt": [
        {"n_heads": 6, "d_model": 96},
        {"n_heads": 12, "d_model": 96, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}},
    ],
    "opt": [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24},  # as OPT-350M
        {"_remove_final_layer_norm": True, "enable_bias": False},
        {"tie_word_embeddings": False, "activation_function": "gelu"},
    ],
    "gpt_neox": [
        {"use_parallel_residual": False, "rotary_pct": 1.0},
        {"attention_bias": False, "rotary_emb_base": 300.0, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 0.25},
    ],
}
CASES = [(family, changes) for family in models.list_families() for changes in [{}, *VARIANTS[family]]]
each_case = pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])


class ReferenceCache:
    """A cache that forgets nothing: for every layer and request a table of pages in order, of the reference backend."""

    PAGE_SIZE = 4

    def __init__(self, spec: ModelSpec, num_requests: int, length: int, dtype: torch.dtype = torch.float32):
        self.spec, n = spec, -(-length // self.PAGE_SIZE)
        shape = (spec.num_layers, num_requests, spec.num_kv_heads, n)
        self.pages = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int32).view(shape)
        self.kv = reference.allocate(1 + self.pages.numel(), self.PAGE_SIZE, spec.head_dim, dtype)
        self.kv.pos.fill_(-1)

    def make_attend(self, counts: Sequence[int], pos: Tensor) -> Attend:
        """For a step with so many fresh tokens of each request, at these positions."""
        s, starts = self.spec, torch.tensor([0, *counts]).cumsum(0).int()
        rows = torch.arange(len(counts), dtype=torch.int32)
        owner = rows.long().repeat_interleave(torch.tensor(counts))  # [T]
        slopes = None if s.alibi_slopes is None else torch.tensor(s.alibi_slopes)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = self.pages[layer]  # [B, G, n]
            slots = pages[owner, :, pos // self.PAGE_SIZE].T * self.PAGE_SIZE + pos % self.PAGE_SIZE  # [G, T]
            reference.write(self.kv, slots.int(), k, v, pos.int())
            tables = Tables(
                pages=pages,
                counts=torch.full(pages.shape[:2], pages.shape[2], dtype=torch.int32),
                windows=torch.full(rows.shape, s.windows[layer] or NO_WINDOW, dtype=torch.int32),
                rows=rows,
                query_start_loc=starts,
            )
            return reference.attend(q, self.kv, tables, pos.int(), scale=s.scale, alibi_slopes=slopes)

        return attend


@torch.inference_mode()
def run_decoder(model: Decoder, texts: Sequence[Tensor], steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of every token of the texts, computed in steps that pay so many tokens of each."""
    slots = ReferenceCache(model.spec, len(texts), max(map(len, texts)), model.embedding(texts[0], texts[0]).dtype)
    done, logits = [0] * len(texts), [[] for _ in texts]
    for counts in steps:
        spans = [slice(n, n + count) for n, count in zip(done, counts, strict=True)]
        pos = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        ids = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)])
        out = model.compute_logits(model.forward(ids, pos, slots.make_attend(counts, pos)))
        for piece, into in zip(out.split(list(counts)), logits, strict=True):
            into.append(piece)
        done = [span.stop for span in spans]
    assert done == list(map(len, texts))
    return [torch.cat(pieces) for pieces in logits]


@torch.inference_mode()
def transformers_logits(checkpoint: TinyCheckpoint, text: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits that transformers computes from the same config and tensors."""
    return build_transformers_model(checkpoint).to(dtype)(text[None]).logits[0].float()


def build_transformers_model(checkpoint: TinyCheckpoint) -> Any:
    """The same model in transformers. All tensors must be known there, in these shapes, and no others be missing."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads(json.dumps(checkpoint.config))
    kind, auto = config.pop("model_type"), AutoModelForCausalLM
    if kind == "gemma3":
        config, auto = {**config, "vision_config": VISION, "mm_tokens_per_image": 4}, AutoModelForImageTextToText
    model = auto.from_config(AutoConfig.for_model(kind, **config), attn_implementation="eager").eval()
    result = model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.names()}, strict=False)
    missing = {name for name in result.missing_keys if "vision_tower" not in name and "projector" not in name}
    assert not result.unexpected_keys and missing <= {"lm_head.weight"}
    return model


@cache
def random_tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(128, (n,), generator=torch.Generator().manual_seed(seed))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.5  # logits that differ clearly
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=5e-5, rtol=0)


@each_case
def test_equals_transformers(family: str, changes: Changes) -> None:
    source = tiny_checkpoint(family, **changes)
    model, ids = models.build(Weights(source, torch.float32)), random_tokens(40)
    theirs = transformers_logits(source, ids)
    for name, steps in {
        "prefill": [40],
        "chunks": [1, 3, 7, 1, 3, 7, 1, 3, 7, 1, 3, 3],
        "decode": [15] + [1] * 25,
    }.items():
        (ours,) = run_decoder(model, [ids], [[n] for n in steps])
        try:
            assert_close(ours, theirs)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from e


@pytest.mark.parametrize("family", models.list_families())
def test_two_requests_of_different_lengths(family: str) -> None:
    source, texts = tiny_checkpoint(family), [random_tokens(40), random_tokens(23, seed=1)]
    ours = run_decoder(models.build(Weights(source, torch.float32)), texts, [[20, 3], [1, 10], [0, 9], [18, 1], [1, 0]])
    for mine, ids in zip(ours, texts, strict=True):
        assert_close(mine, transformers_logits(source, ids))


@each_case
def test_the_config_that_transformers_5_writes_is_read_the_same(family: str, changes: Changes) -> None:
    source = tiny_checkpoint(family, **changes)
    (ours,) = run_decoder(models.build(Weights(source, torch.float32)), [random_tokens(40)], [[40]])
    config = json.loads(build_transformers_model(source).config.to_json_string(use_diff=False))
    assert "rope_theta" not in config
    (again,) = run_decoder(
        models.build(Weights(TinyCheckpoint(config, source.shapes, source.seed), torch.float32)),
        [random_tokens(40)],
        [[40]],
    )
    assert torch.equal(ours, again)


@pytest.mark.parametrize("family", models.list_families())
def test_bfloat16_is_as_near_as_that_of_transformers(family: str) -> None:
    source, ids = tiny_checkpoint(family), random_tokens(40)
    (ours,) = run_decoder(tiny_model(family, torch.bfloat16), [ids], [[20], [20]])
    exact = transformers_logits(source, ids)
    error, theirs = (ours - exact).std(), (transformers_logits(source, ids, torch.bfloat16) - exact).std()
    assert ours.dtype == torch.float32
    assert 0 < error < 1.3 * theirs < 0.3 * exact.std()


def test_every_family_has_a_tiny_model() -> None:
    assert sorted(CONFIGS) == sorted(VARIANTS) == models.list_families()


def test_mpt_honours_alibi_bias_max() -> None:
    """transformers has the formula, but its model never passes the number on."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads, largest in ((4, 8), (8, 16), (6, 4), (12, 5), (1, 8)):
        config = {**CONFIGS["mpt"], "n_heads": heads, "d_model": 96, "attn_config": {"alibi_bias_max": largest}}
        theirs = -build_mpt_alibi_tensor(heads, 2, largest)[:, 0, 0]  # distance 1
        torch.testing.assert_close(torch.tensor(models.load_family("mpt").spec(config).slopes), theirs)


class RenamedCheckpoint:
    """A source whose file has other names."""

    def __init__(self, checkpoint: TinyCheckpoint, old: str, new: str):
        self.config, self.checkpoint = checkpoint.config, checkpoint
        self.old_names = {name.replace(old, new): name for name in checkpoint.names()}

    def names(self) -> set[str]:
        return set(self.old_names)

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(self.old_names[name])

    def read_quantized(self, name: str, transposed: bool = False) -> None:
        return None


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama", "model.", ""),
        ("gemma3_text", "model.", ""),
        ("gemma3", "model.language_model.", "language_model.model."),  # files on the hub
        ("gemma3", "model.language_model.", "model."),  # the text alone
        ("gpt2", "transformer.", ""),  # OpenAI's own
        ("gptj", "transformer.", ""),
        ("mpt", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("gpt_neox", "gpt_neox.", ""),
        ("gpt_neox", "lm_head", "embed_out"),  # files on the hub
    ],
)
def test_other_names_of_the_same_tensors(family: str, old: str, new: str) -> None:
    source = tiny_checkpoint(family)
    decoders = [models.build(Weights(s, torch.float32)) for s in (source, RenamedCheckpoint(source, old, new))]
    a, b = (run_decoder(d, [random_tokens(9)], [[9]])[0] for d in decoders)
    assert torch.equal(a, b)


SOFTCAP = {"final_logit_softcapping": 30.0}


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json lacks 'low_freq_factor'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"hidden_act": "quick_gelu"}, "activation 'quick_gelu' is not supported"),
        ("llama", {"hidden_size": None}, "config.json lacks 'hidden_size'"),
        ("llama", {"num_attention_heads": 3}, "do not fit its config"),
        ("llama", {"num_key_value_heads": 4}, "do not fit its config"),
        ("llama", {"num_attention_heads": 0}, "do not fit its config"),
        ("llama", {"num_attention_heads": "many"}, "do not fit its config"),
        ("llama", {"vocab_size": 127}, "128 logits for a vocabulary of 127"),
        ("llama", {"vocab_size": 129}, "do not fit its config"),
        ("llama", {"num_hidden_layers": 4}, "no tensor 'model.layers.3."),
        ("llama", {"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
        ("llama", {"model_type": "mamba"}, "model type 'mamba' is not supported: one of gemma3, gemma3_text, gpt2, "),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types"),
        ("gemma3_text", SOFTCAP, "final_logit_softcapping=30.0 is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma3", {"text_config": {**CONFIGS["gemma3_text"], **SOFTCAP}}, "final_logit_softcapping=30.0"),
        ("gemma3", {"text_config": None}, "config.json lacks 'text_config'"),
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
        ("gpt_neox", {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    ],
)
def test_refuses_in_one_line(family: str, changes: Changes, why: str) -> None:
    source = tiny_checkpoint(family, tie_word_embeddings=True)  # what the file has
    source.config = {k: v for k, v in {**source.config, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=re.escape(why)) as e:
        models.build(Weights(source, torch.float32))
    assert "\n" not in str(e.value)


def test_a_file_with_some_biases_only_is_refused() -> None:
    source = tiny_checkpoint("qwen2")
    del source.shapes["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match="some but not all of q_proj, k_proj, v_proj have a bias"):
        models.build(Weights(source, torch.float32))
