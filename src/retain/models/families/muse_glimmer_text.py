"""Muse Glimmer, text: three sliding layers with rope to a full one without; gated outputs, bounded logits.

The embedding is normalized. Norms are before and after both branches and multiply by 1 + w, the last one by w. Heads of
q and k are normalized without weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from retain.files import quote
from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Attention, Decoder, ModelSpec, SandwichNormLayer, load_ends
from retain.models.family_config import add_defaults, get_layer_types, get_windows
from retain.models.layers import CappedHead, Embedding, RMSNorm, load_linear
from retain.models.rope import get_rope_parameters, get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 202048,
    "hidden_size": 6656,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "layer_rope_theta": None,  # 0, which is no rope, in every fourth layer
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "final_logit_softcapping": 20.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
PATTERN = 4  # a full layer in so many, counted from the last one


def is_every_fourth(c: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer is one of every fourth, of which the last layer is one."""
    n = c["num_hidden_layers"]
    return [(n - 1 - i) % PATTERN == 0 for i in range(n)]


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. Every fourth layer is full by default."""
    c = add_defaults(c, DEFAULTS)
    default = ["full_attention" if x else "sliding_attention" for x in is_every_fourth(c)]
    spec = llama_like.make_spec(c, get_windows(get_layer_types(c, default), c["sliding_window"]))
    return replace(spec, attention=AttentionParams(spec.attention.scale * c["qk_scale_factor"]))


def read_rotated_layers(c: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer rotates its heads. Raises ValueError unless all that do have the config's base."""
    thetas = c["layer_rope_theta"]
    if thetas is None:
        return [not x for x in is_every_fourth(c)]
    n = c["num_hidden_layers"]
    base = get_rope_parameters(c)["rope_theta"]
    if not isinstance(thetas, list) or len(thetas) != n or not all(theta in (0, base) for theta in thetas):
        raise ValueError(f"layer_rope_theta is {quote(thetas)}, not 0 or {quote(base)} for each of {n} layers")
    return [theta != 0 for theta in thetas]


@dataclass(frozen=True, eq=False, kw_only=True)
class NormedEmbedding(Embedding):
    """An embedding with a norm behind it."""

    norm: RMSNorm

    def emit(self, out: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which fills buffer `out` for the ids and positions of a step."""
        yield from super().emit(out)
        yield from self.norm.emit(out, out)


def build_attention(w: Weights, i: int, s: ModelSpec, rope: Rope | None) -> Attention:
    """Build the attention of one layer."""
    c = w.config
    tensors = llama_like.OptionalTensors.of_attention(c["attention_bias"])
    sizes = s.kv_cache.attention(i)
    qk_norm = RMSNorm(torch.ones(s.num_heads + sizes.num_kv_heads, sizes.k_dim), c["rms_norm_eps"])
    gate = load_linear(w, "gate_proj", bias=False)
    return replace(llama_like.build_attention(w, i, s, rope, tensors), qk_norm=qk_norm, gate_proj=gate)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. The last norm multiplies logits by their factor."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    rope = get_whole_head_rope(s.kv_cache.attention(0).k_dim, c)
    is_rotated = read_rotated_layers(c)
    eps = c["rms_norm_eps"]
    m, table, head = load_ends(w, "model.", "model.language_model.", "")

    def load_layer(i: int) -> SandwichNormLayer:
        layer = m.scope(f"layers.{i}.")
        attention = build_attention(layer.scope("self_attn."), i, s, rope if is_rotated[i] else None)
        return llama_like.load_sandwich_layer(layer, attention, c["post_norm_eps"])

    embedding = NormedEmbedding(table, norm=RMSNorm(torch.ones(s.hidden_size), eps))
    norm = RMSNorm(m["norm.weight"].float() * w.logits_factor(c["output_multiplier"]), eps)
    output = CappedHead(head, float(c["final_logit_softcapping"]))
    return Decoder(s, embedding, load_layer, norm, output, [rope])
