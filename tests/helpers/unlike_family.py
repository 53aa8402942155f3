"""A family that lives in tests only, whose layers differ: in head dims, kv heads and windows, and two share a cache.

It has sink logits and a softcap too. Layer 1 projects keys only, which are its values before rope. The model type is
"unlike"; the fixture makes it known to a test. `plain_logits` computes the same model in torch, without any of the
package's layers. VARIANTS are further model types: all layers full and none shared, or one full layer only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.slots.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    LayerCacheSpec,
    SharedCacheSpec,
    SlidingWindowSpec,
)
from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.layers import Embedding, GatedMLP, RMSNorm, load_linear, load_lm_head
from retain.models.rope import Rope
from retain.models.weights import Weights
from tests.helpers import tiny_models
from tests.helpers.extra_family import add_family

UNLIKE = "unlike"
WINDOW = 16
LAYERS: tuple[LayerCacheSpec, ...] = (
    SlidingWindowSpec(2, 64, 64, WINDOW),
    FullAttentionSpec(1, 128, 128),
    SlidingWindowSpec(2, 64, 64, WINDOW),
    SharedCacheSpec(1),
    FullAttentionSpec(2, 64, 64),
)
ATTENTION = map(KVCacheSpec(LAYERS).attention, range(len(LAYERS)))
ALL_FULL = tuple(FullAttentionSpec(a.num_kv_heads, a.k_dim, a.v_dim) for a in ATTENTION)
KEYS_ARE_VALUES = 1  # the layer without a projection of values
SOFTCAP = 3.0
THETA = 10000.0
EPS = 1e-5


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, llama.DEFAULTS)
    layers = ALL_FULL if c["all_full"] else LAYERS
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=c["num_attention_heads"],
        max_position_embeddings=c["max_position_embeddings"],
        caches=layers[: c["num_hidden_layers"]],
        attention=AttentionParams(0.1, softcap=SOFTCAP),
    )


def projections(spec: ModelSpec, layer: int) -> Sequence[str]:
    """Return the projections that a layer stacks."""
    if isinstance(spec.caches[layer], SharedCacheSpec):
        return ("q_proj",)
    return ("q_proj", "k_proj", "k_proj" if layer == KEYS_ARE_VALUES else "v_proj")


def build(w: Weights) -> Decoder:
    """Build the decoder."""
    w = w.with_defaults(llama.DEFAULTS)
    s = spec_from_config(w.config)
    ropes = {D: Rope(frequencies(D)) for D in (64, 128)}
    m = w.scope("model.")
    table = m.load_matrix("embed_tokens.weight", embedding=True)

    def load_layer(i: int) -> PreNormLayer:
        layer = m.scope(f"layers.{i}.")
        a = layer.scope("self_attn.")
        params = replace(s.attention, sink_logits=a["sinks"].float())
        qkv, o = load_linear(a, *projections(s, i), bias=False), load_linear(a, "o_proj", bias=False)
        rope = ropes[s.kv_cache.attention(i).k_dim]
        norm1, norm2 = (RMSNorm(layer[f"{n}.weight"], EPS) for n in ("input_layernorm", "post_attention_layernorm"))
        gate_up = load_linear(layer, "mlp.gate_proj", "mlp.up_proj", bias=False)
        mlp = GatedMLP(gate_up, load_linear(layer, "mlp.down_proj", bias=False), "silu")
        return PreNormLayer(norm1, Attention(i, s, qkv, o, rope, own_params=params), norm2, mlp)

    norm = RMSNorm(m["norm.weight"], EPS)
    head = load_lm_head(w, "lm_head", table, None)
    return Decoder(s, Embedding(table), load_layer, norm, head, list(ropes.values()))


def frequencies(dim: int) -> Tensor:
    """Return rope's frequencies, [dim / 2]."""
    return THETA ** -(torch.arange(0, dim, 2).float() / dim)


CONFIG = {**tiny_models.LLAMA, "num_hidden_layers": len(LAYERS), "all_full": False}
VARIANTS = {
    UNLIKE: CONFIG,
    "unlike_full": {**CONFIG, "all_full": True},
    "unlike_windows": {**CONFIG, "num_hidden_layers": 3},  # one layer without a window
}


def shapes(c: dict[str, Any]) -> tiny_models.Shapes:
    E, I, V, H = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]
    model = spec_from_config(c)
    spec = model.kv_cache
    yield "model.embed_tokens.weight", (V, E)
    for i in range(c["num_hidden_layers"]):
        p, a = f"model.layers.{i}.", spec.attention(i)
        out = {"q_proj": H * a.k_dim, "k_proj": a.num_kv_heads * a.k_dim, "v_proj": a.num_kv_heads * a.v_dim}
        for name in dict.fromkeys(projections(model, i)):
            yield f"{p}self_attn.{name}.weight", (out[name], E)
        yield p + "self_attn.o_proj.weight", (E, H * a.v_dim)
        yield p + "self_attn.sinks", (H,)
        for name, shape in (("gate", (I, E)), ("up", (I, E)), ("down", (E, I))):
            yield f"{p}mlp.{name}_proj.weight", shape
        yield p + "input_layernorm.weight", (E,)
        yield p + "post_attention_layernorm.weight", (E,)
    yield "model.norm.weight", (E,)
    yield "lm_head.weight", (V, E)


def plain_logits(tokens: Sequence[int], seed: int = 0, **changes: Any) -> Tensor:
    """Return the logits [T, V] of a text, by torch alone."""
    file = tiny_models.tiny_checkpoint(UNLIKE, seed, **changes)
    H, pos = file.config["num_attention_heads"], torch.arange(len(tokens))
    distance = pos[:, None] - pos
    cached: dict[int, tuple[Tensor, Tensor]] = {}
    x = file.read("model.embed_tokens.weight")[list(tokens)]
    for i in range(file.config["num_hidden_layers"]):
        weight = {n: file.read(n) for n in file.shapes if n.startswith(f"model.layers.{i}.")}
        w = {n.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): t for n, t in weight.items()}
        kind = LAYERS[i]
        source = kind.cache if isinstance(kind, SharedCacheSpec) else i
        sizes: Any = LAYERS[source]
        h = rms_norm(x, w["input_layernorm"])
        q = rotate((h @ w["self_attn.q_proj"].T).view(len(h), H, -1), pos)
        if source == i:
            k = (h @ w["self_attn.k_proj"].T).view(len(h), sizes.num_kv_heads, -1)
            v = k if i == KEYS_ARE_VALUES else (h @ w["self_attn.v_proj"].T).view(len(h), sizes.num_kv_heads, -1)
            cached[i] = rotate(k, pos), v
        k, v = (t.repeat_interleave(H // sizes.num_kv_heads, 1) for t in cached[source])
        scores = SOFTCAP * torch.tanh(0.1 * torch.einsum("thd,shd->hts", q, k) / SOFTCAP)
        visible = (distance >= 0) & (distance < (sizes.window or len(tokens)))
        scores = scores.masked_fill(~visible, -torch.inf)
        sinks = w["self_attn.sinks"].view(-1, 1, 1).expand(-1, len(tokens), 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        x = x + torch.einsum("hts,shd->thd", weights, v).flatten(1) @ w["self_attn.o_proj"].T
        h = rms_norm(x, w["post_attention_layernorm"])
        x = x + (F.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms_norm(x, file.read("model.norm.weight")) @ file.read("lm_head.weight").T


def plain_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the most probable next tokens, one after another."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize rows by the root of their mean square."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, pos: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by position: numbers i and i + D / 2 are a pair."""
    angle = pos[:, None, None] * frequencies(x.shape[-1])
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


@pytest.fixture
def unlike_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the family known to a test; gives its model type."""
    add_unlike_families(monkeypatch)
    yield UNLIKE


def add_unlike_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the family and its variants known."""
    for model_type, config in VARIANTS.items():
        add_family(monkeypatch, model_type, sys.modules[__name__], config, shapes)
